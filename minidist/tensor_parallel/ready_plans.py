"""Plans for models that many people train. Each is a dict: print it, change it.

With `sequence_parallel`, attention must take the number of tokens from its queries: what comes into
the block is this rank's part of the tokens. Hugging Face's Llama takes it from its input.
"""

from typing import Any

from torch import nn

from minidist.tensor_parallel.styles import HeadsOfConfig, heads, qkv


def transformer_plan(model: Any) -> dict[str, Any]:
    """For `zoo.Transformer`. Lesson: feature_splitting."""
    return {
        "tokens": "vocabulary",
        "positions": "scattered",
        "blocks.*": heads("heads"),
        "blocks.*.norm*": "sequence",
        "blocks.*.qkv": qkv(model.blocks[0].heads),
        "blocks.*.out": "rows",
        "blocks.*.mlp.0": "columns",
        "blocks.*.mlp.2": "rows",
        "norm": "sequence",
        "head": "vocabulary",
    }


def gpt2_plan(model: nn.Module) -> dict[str, Any]:
    """For a model with the names of GPT-2, whose linear layers are `nn.Linear`: one for queries,
    keys and values, and the number of heads in `n_head` or `num_heads`.
    Lesson: feature_splitting."""
    attention = model.get_submodule("transformer.h.0.attn")
    (name,) = (name for name in ("n_head", "num_heads") if hasattr(attention, name))
    block = "transformer.h.*"
    return {
        "transformer.wte": "vocabulary",
        "transformer.wpe": "scattered",
        f"{block}.ln_*": "sequence",
        f"{block}.attn": heads(name),
        f"{block}.attn.c_attn": qkv(getattr(attention, name)),
        f"{block}.attn.c_proj": "rows",
        f"{block}.mlp.c_fc": "columns",
        f"{block}.mlp.c_proj": "rows",
        "transformer.ln_f": "sequence",
        "lm_head": "vocabulary",
    }


def llama_plan(model: nn.Module) -> dict[str, Any]:
    """For Hugging Face's Llama: grouped queries, and an MLP with a gate. Lesson: feature_splitting.

        model = LlamaForCausalLM(config)                    # the same on every rank
        parallelize_module(model, None, llama_plan(model))
        model(tokens, labels=tokens).loss.backward()

    Embedding and head stay whole: logits, `labels=` and `generate` are those of one process, and
    the embedding may have `padding_idx`. (To sample, seed the ranks alike.)

    For a large vocabulary, add "lm_head": "vocabulary" to the plan; a tied embedding likewise.
    Then the loss is `vocab_parallel_cross_entropy` of the logits, which are of a rank's own tokens.

    Raises ValueError, where it is applied, if the ranks cannot share `num_attention_heads` or
    `num_key_value_heads`, and with `sequence_parallel`.
    """
    block = "model.layers.*"
    return {
        f"{block}.self_attn": HeadsOfConfig(("num_attention_heads", "num_key_value_heads")),
        **{f"{block}.self_attn.{each}_proj": "columns" for each in "qkv"},
        f"{block}.self_attn.o_proj": "rows",
        f"{block}.mlp.gate_proj": "columns",
        f"{block}.mlp.up_proj": "columns",
        f"{block}.mlp.down_proj": "rows",
    }
