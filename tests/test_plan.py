"""A model and its plan, with which test_parallelize_module trains; and a plan that does not fit
says where."""

import pytest
import torch
from fuzz.random_models import LENGTH, Llama, llama_plan
from fuzz.random_models import WORDS as VOCABULARY
from torch import nn

import minidist as md
from minidist import tensor_parallel as tp

WIDTH = 32


def llama(heads=8, kv_heads=4, seed=0):
    torch.manual_seed(seed)
    return Llama(heads, kv_heads, layers=2)


def zoo():
    return md.zoo.Transformer(VOCABULARY, LENGTH, WIDTH, heads=4)


MODELS = {"zoo": (zoo, tp.transformer_plan), "llama": (llama, llama_plan)}


def apart(named):
    differences = {name: md.parity.relative_difference(a, b) for name, (a, b) in named.items()}
    return [f"{name}: {d:.1e}" for name, d in differences.items() if not d <= 1e-12]


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- Hugging Face's Llama ----------------------------------------------------------------------

COLUMNS = *(f"self_attn.{each}_proj" for each in "qkv"), "mlp.gate_proj", "mlp.up_proj"
ROWS = "self_attn.o_proj", "mlp.down_proj"
HUGGING_FACES = {f"model.layers.*.{name}": "columns" for name in COLUMNS}
HUGGING_FACES |= {f"model.layers.*.{name}": "rows" for name in ROWS}


def hugging_faces():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, pad_token_id=0)
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes | heads)).double().eval()


def beside_one_process():
    model, alone = hugging_faces(), hugging_faces()
    tp.parallelize_module(model, None, HUGGING_FACES)
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[0, :3] = 0  # padding
    inputs = dict(input_ids=tokens, attention_mask=tokens.ne(0).long())
    ours, theirs = (each(**inputs, labels=tokens) for each in (model, alone))
    found = apart({name: (ours[name], theirs[name]) for name in ("loss", "logits")})
    ours, theirs = (each.generate(**inputs, max_new_tokens=8) for each in (model, alone))
    return found + ["generate"] * (not torch.equal(ours, theirs))


@pytest.mark.tools
def test_a_llama_of_hugging_face_is_used_as_on_one_process(pools):
    assert pools(2)(beside_one_process) == [[]] * 2


# ---- what does not fit ------------------------------------------------------------------------


class Gate(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_a_gate():
    model = llama()
    model.model.layers[1].mlp.up_proj = Gate(WIDTH, 3 * WIDTH)
    return model


def tied():
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


WRONG = {
    "a name": (
        llama,
        lambda m: {"model.layers.*.attention.q_proj": "columns"},
        "ValueError: the plan's 'model.layers.*.attention.q_proj' matches no module",
    ),
    "two styles": (
        llama,
        lambda m: llama_plan(m) | {"model.layers.*.self_attn.*": "columns"},
        "ValueError: model.layers.0.self_attn.o_proj and model.layers.0.self_attn.o_proj are one "
        "module, with two styles in the plan",
    ),
    "heads": (
        lambda: llama(kv_heads=1),
        llama_plan,
        "ValueError: model.layers.0.self_attn: num_key_value_heads over 2 ranks: 1 is not a "
        "multiple of 2",
    ),
    "queries, keys and values by columns": (
        lambda: md.zoo.Block(8, 2),
        lambda m: {"qkv": "columns"},
        "ValueError: qkv: columns cut through queries, keys and values: take qkv(...)",
    ),
    "a norm by columns": (
        llama,
        lambda m: llama_plan(m) | {"model.norm": "columns"},
        "TypeError: model.norm: 'columns' splits an nn.Linear, not a RMSNorm",
    ),
    "a layer of their own": (
        with_a_gate,
        llama_plan,
        "TypeError: model.layers.1.mlp.up_proj: 'columns' splits an nn.Linear, not a Gate",
    ),
    "a tie of which one end is split": (
        tied,
        lambda m: {k: v for k, v in llama_plan(m).items() if k != "lm_head"},
        "ValueError: model.embed_tokens.weight and lm_head.weight are one parameter, and the plan "
        "does not split both in the same way",
    ),
    "a style": (
        llama,
        lambda m: {"lm_head": "column"},
        "ValueError: the plan's 'lm_head': no style 'column'; there are columns, rows, vocabulary",
    ),
    "no plan": (
        llama,
        lambda m: None,
        "TypeError: a Llama is not a zoo.Transformer: a plan must say how it is split",
    ),
}


def test_a_plan_that_does_not_fit_says_where_and_changes_nothing(pools):
    def run(what):
        make, plan, _ = WRONG[what]
        torch.manual_seed(0)
        model = make()
        before = str(model), {k: v.clone() for k, v in model.state_dict().items()}
        told, after = raised(tp.parallelize_module, model, None, plan(model)), model.state_dict()
        same = all(torch.equal(v, after[k]) for k, v in before[1].items())
        return told, str(model) == before[0] and same

    for what, (*_, words) in WRONG.items():
        for told, same in pools(2)(run, what):
            assert told is not None and told.startswith(words) and same, (what, told)


def test_a_tied_head_stays_tied(pools):
    def run():
        model = tied()
        tp.parallelize_module(model, None, llama_plan(model))
        return model.lm_head.weight is model.model.embed_tokens.weight

    assert all(pools(2)(run))
