"""What a rank holds at the peak of a step: model states, activations, the loss, and copies.
Korthikanti et al., "Reducing Activation Recomputation" (arXiv 2205.05198), section 4.
Lesson: zero.

With s tokens, b sequences, a heads, h wide, in 16 bits, t ranks that share each layer, for GPT with
dropout, a layer keeps (Table 2):

| | bytes |
|---|---|
| one rank, stored attention | sbh (34 + 5as/h) |
| tensor parallel | sbh (10 + 24/t + 5as/(ht)) |
| and sequence parallel | sbh (34/t + 5as/(ht)) |
| flash attention, or recompute="attention" | without 5as/(ht) |
| recompute="elementwise", no scores | sbh (6 + 16/t); with sequence parallel 22sbh/t |
| recompute="layers" | 2sbh; with sequence parallel 2sbh/t |

Left out, a few numbers a token: what norms and flash attention keep beside their tensors.
"""

from dataclasses import replace

from minidist.instruments.planner.layout import Layout, stages
from minidist.instruments.planner.model_states import PRECISIONS, Memory, memory
from minidist.instruments.planner.transformer import Transformer


def layer_activations(model: Transformer, layout: Layout, precision: str = "mixed") -> float:
    """Bytes that one layer keeps of one micro-batch for backward, if nothing is recomputed."""
    c, h, masks = PRECISIONS[precision].compute, model.width, model.dropout
    whole = c * 4 * h + (2 * h if masks else 0)  # inputs and outputs of both norms; masks, a byte
    attention = _attention(model, layout)
    mlp = _mlp(model, layout, 4 if model.llama else 2)  # gated: gate, up, silu(gate), product
    each = whole / _along(layout) + c * (attention + mlp)
    return _tokens(model, layout) * each + _scores(model, layout, c)


def kept_activations(model: Transformer, layout: Layout, precision: str = "mixed") -> float:
    """Bytes that one layer keeps of one micro-batch from forward to backward, as `recompute` says:
    backward computes the rest of `layer_activations` again, one layer at a time.

    "elementwise": results of matrices, the norms' inputs, and attention's output. "operations":
    torchtitan's policy of December 2024, the layer's input, attention's output and every second
    matrix product from the first on.
    """
    c, h, t = PRECISIONS[precision].compute, model.width, layout.tensor
    tokens, along = _tokens(model, layout), _along(layout)
    match layout.recompute:
        case "layers":
            return tokens * c * h / along
        case "operations":
            products = [width for width, _ in model.products(t)[::2]]
            last = h / along if model.llama else 0  # down's, the seventh of seven
            own = sum(products[:-1] if model.llama else products)
            return tokens * c * (h / along + model.attention_width / t + own + last)
        case "elementwise":
            mlp = _mlp(model, layout, 2 if model.llama else 1)
            attention = _attention(model, layout)
            masks = 2 * h / along if model.dropout else 0
            kept = tokens * (c * (2 * h / along + attention + mlp) + masks)
            return kept + _scores(model, layout, c)
        case "attention":
            return layer_activations(model, layout, precision) - _scores(model, layout, c)
    return layer_activations(model, layout, precision)


def logits(model: Transformer, layout: Layout, precision: str = "mixed") -> float:
    """Bytes at the loss of one micro-batch, of a vocabulary that is shared by the tensor ranks: the
    logits; and in float32 their log softmax and the gradients of both, 4 bytes each. With
    `loss_chunks`, of a part of the tokens at once."""
    c, t = PRECISIONS[precision].compute, layout.tensor
    inputs = 2 * c * model.width / _along(layout)  # of norm and head
    words = (c + 12) * model.vocabulary / t / layout.loss_chunks
    return _tokens(model, layout) * (inputs + words)


def copies(
    model: Transformer, layout: Layout, parameters: float, precision: str = "mixed"
) -> float:
    """Bytes that are there while they compute. In ZeRO-3, two units' parameters and gradients, one
    at work and one on its way; a unit is a layer, the embedding, or the head; if these two are tied
    they stay. If they are not resharded after forward, and with autocast in the other stages: all
    parameters in 16 bits. Lesson: fully_sharded."""
    size = PRECISIONS[precision]
    if layout.stage < 3:
        return size.compute * parameters if size.compute < size.parameter else 0
    t, shards = layout.tensor, layout.rows_in
    layer = model.layer_parameters(t, shards) + model.expert_parameters() // layout.experts
    head = model.head_parameters(t, model.tied, shards)
    end = max(model.embedding_parameters(t, shards), head)
    units = end + 2 * layer if model.tied else layer + max(layer, end)
    gathered = units if layout.reshard_after_forward else parameters
    return size.compute * gathered + size.gradient * (parameters if layout.keeps_units else units)


def peak(
    model: Transformer, layout: Layout, *, optimizer: str = "adam", precision: str = "mixed"
) -> Memory:
    """Bytes at the peak of a step, of the rank that needs most. Lesson: zero.

    The first pipeline stage has the embedding and most micro-batches in flight, the last one the
    loss; tied weights are on both. Raises ValueError as `memory`, and if the model cannot be cut.
    """
    every = peaks(model, layout, optimizer=optimizer, precision=precision)
    return max(every, key=lambda each: each.total)


def peaks(
    model: Transformer, layout: Layout, *, optimizer: str = "adam", precision: str = "mixed"
) -> list[Memory]:
    """The same of a rank of each pipeline stage."""
    kept, held = kept_activations(model, layout, precision), []
    again = layer_activations(model, layout, precision) - kept
    for stage in stages(model, layout):
        own = stage.parameters(model, layout.tensor, layout.rows_in)
        states = memory(own, layout.shards, layout.stage, optimizer=optimizer, precision=precision)
        if routed := stage.routed(model, layout):
            ranks = layout.expert_shards
            of_them = memory(routed, ranks, layout.stage, optimizer=optimizer, precision=precision)
            pairs = zip(vars(states).values(), vars(of_them).values(), strict=True)
            states, own = Memory(*map(sum, pairs)), own + routed
        loss = logits(model, layout, precision) if stage.last else 0.0
        live = layout.in_flight(stage.number) * stage.layers * kept
        each = replace(
            states,
            # The loss has gone when a layer is computed again: the larger of both counts.
            activations=live + (again if again > loss else 0),
            logits=loss if loss >= again else 0,
            copies=copies(model, layout, own, precision),
        )
        held.append(each)
    return held


def _tokens(model: Transformer, layout: Layout) -> float:
    """Of a micro-batch, on one rank."""
    return layout.micro_batch * model.length / layout.context


def _along(layout: Layout) -> int:
    """Ranks that share what lies between matrices."""
    return layout.tensor if layout.sequence_parallel else 1


def _attention(model: Transformer, layout: Layout) -> int:
    """Numbers a token: queries and output, keys and values. In Ulysses the output is there twice,
    of some heads and of all, and each rank has a head of keys at least."""
    t, c, way = layout.tensor, layout.context, layout.context_attention
    outputs = 2 if way == "ulysses" and c > 1 else 1
    keys = {"gathered once": c, "ulysses": copies_of_keys(model, layout)}.get(way, 1)
    return (1 + outputs) * model.attention_width // t + 2 * model.kv_width(t) * keys


def _mlp(model: Transformer, layout: Layout, results: int) -> float:
    """Numbers a token, of so many results as wide as the MLP; with experts, on the fullest rank,
    also of the rows that arrive for them and that they give."""
    if not model.experts:
        return results * model.mlp_width // layout.tensor
    routed = model.active * (results * model.expert_width + 2 * model.width)
    shared = results * model.expert_width * model.shared
    return (layout.imbalance * routed + shared) / layout.tensor


def copies_of_keys(model: Transformer, layout: Layout) -> int:
    """To how many ranks Ulysses sends a head of keys, where there are fewer heads than ranks."""
    return max(1, layout.context // model.kv_heads_of(layout.tensor))


def _scores(model: Transformer, layout: Layout, c: int) -> float:
    """Bytes of stored scores: softmax; with dropout its mask, a byte, and what that leaves."""
    if not layout.stored_attention:
        return 0.0
    each = c + (1 + c if model.dropout else 0)
    return _tokens(model, layout) * model.heads * model.length * each / layout.tensor
