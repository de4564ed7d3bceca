"""Models of several makes and their plans, with which test_parallelize_module trains; and a plan
that does not fit says where."""

import pytest
import torch
import torch.nn.functional as F
from fuzz.random_models import LENGTH, Llama, llama_plan
from fuzz.random_models import WORDS as VOCABULARY
from torch import nn

import minidist as md
from minidist import tensor_parallel as tp

WIDTH = 32


def attention(q, k, v):
    """(B, T, H, D), of fewer keys and values than queries, to (B, T, H D)."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT2(nn.Module):
    def __init__(self, layers=2, heads=4):
        super().__init__()
        torch.manual_seed(0)
        parts = dict(
            wte=nn.Embedding(VOCABULARY, WIDTH),
            wpe=nn.Embedding(LENGTH, WIDTH),
            h=nn.ModuleList([GPT2Block(heads) for _ in range(layers)]),
            ln_f=nn.LayerNorm(WIDTH),
        )
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class GPT2Block(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = GPT2Attention(heads)
        layers = dict(c_fc=nn.Linear(WIDTH, 4 * WIDTH), act=nn.GELU())
        self.mlp = nn.Sequential()
        for name, layer in (layers | dict(c_proj=nn.Linear(4 * WIDTH, WIDTH))).items():
            self.mlp.add_module(name, layer)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.n_head, self.c_attn = heads, nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (e.unflatten(-1, (self.n_head, -1)) for e in self.c_attn(x).chunk(3, -1))
        return self.c_proj(attention(q, k, v))


def llama(heads=8, kv_heads=4, seed=0):
    torch.manual_seed(seed)
    return Llama(heads, kv_heads, layers=2)


def zoo():
    return md.zoo.Transformer(VOCABULARY, LENGTH, WIDTH, heads=4)


MODELS = {
    "zoo": (zoo, tp.transformer_plan),
    "gpt2": (GPT2, tp.gpt2_plan),
    "llama": (llama, llama_plan),
}


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


def hugging_faces(**config):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, pad_token_id=0)
    heads = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes | heads | config)).double().eval()


def beside_one_process(more, **config):
    model, alone = hugging_faces(**config), hugging_faces(**config)
    tp.parallelize_module(model, None, tp.llama_plan(model) | more)
    tokens = torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[0, :3] = 0  # padding
    inputs = dict(input_ids=tokens, attention_mask=tokens.ne(0).long())
    if more:
        ours, theirs = (each(**inputs).logits[:, :-1] for each in (model, alone))
        ours = md.vocab_parallel_cross_entropy(ours, tokens[:, 1:])
        return apart({"loss": (ours, md.parity.cross_entropy(theirs, tokens[:, 1:]))})
    ours, theirs = (each(**inputs, labels=tokens) for each in (model, alone))
    found = apart({name: (ours[name], theirs[name]) for name in ("loss", "logits")})
    ours, theirs = (each.generate(**inputs, max_new_tokens=8) for each in (model, alone))
    return found + ["generate"] * (not torch.equal(ours, theirs))


@pytest.mark.tools
def test_a_llama_of_hugging_face_is_used_as_on_one_process(pools):
    two = pools(2)
    assert two(beside_one_process, {}) == [[]] * 2
    assert two(beside_one_process, {}, tie_word_embeddings=True) == [[]] * 2
    assert two(beside_one_process, {"lm_head": "vocabulary"}) == [[]] * 2


@pytest.mark.tools
def test_what_a_llama_of_hugging_face_cannot_do_is_told_before_it_runs(pools):
    def run(kv_heads, **options):
        model = hugging_faces(num_key_value_heads=kv_heads)
        return raised(tp.parallelize_module, model, None, tp.llama_plan(model), **options)

    where, heads = "ValueError: model.layers.0.self_attn", "num_key_value_heads over 2 ranks: 1 is"
    assert pools(2)(run, 1) == [f"{where}: {heads} not a multiple of 2"] * 2
    words = "it takes the number of tokens from its input: no sequence_parallel"
    assert pools(2)(run, 2, sequence_parallel=True) == [f"{where}: {words}"] * 2


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
        "ValueError: the plan's 'model.layers.*.attention.q_proj' matches no module: "
        "model.layers.0 has input_layernorm, post_attention_layernorm, self_attn, mlp",
    ),
    "the first part of a name": (
        llama,
        lambda m: {"transformer.h.*": "columns"},
        "ValueError: the plan's 'transformer.h.*' matches no module: the model has model, lm_head",
    ),
    "twice": (
        llama,
        lambda m: llama_plan(m) | {"model.layers.*.self_attn.*": "columns"},
        "ValueError: model.layers.0.self_attn.q_proj: the plan names it twice, by "
        "'model.layers.*.self_attn.q_proj' and 'model.layers.*.self_attn.*'",
    ),
    "heads": (
        lambda: llama(kv_heads=1),
        llama_plan,
        "ValueError: model.layers.0.self_attn: num_key_value_heads over 2 ranks: 1 is not a "
        "multiple of 2",
    ),
    "no such number": (
        llama,
        lambda m: {"model.layers.*.self_attn": tp.heads("heads")},
        "ValueError: model.layers.0.self_attn: a Attention has no number 'heads' to divide",
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
}


def test_a_plan_that_does_not_fit_says_where_and_changes_nothing(pools):
    def run(what):
        make, plan, _ = WRONG[what]
        model = make()
        before = str(model), {k: v.clone() for k, v in model.state_dict().items()}
        told, after = raised(tp.parallelize_module, model, None, plan(model)), model.state_dict()
        same = all(torch.equal(v, after[k]) for k, v in before[1].items())
        return told, str(model) == before[0] and same

    for what, (*_, words) in WRONG.items():
        for told, same in pools(2)(run, what):
            assert told is not None and told.startswith(words) and same, (what, told)


def test_without_a_plan_it_must_be_the_zoos_transformer(pools):
    words = "TypeError: a Llama is not a zoo.Transformer: a plan must say how it is split"
    assert pools(2)(lambda: raised(tp.parallelize_module, llama())) == [words] * 2


def test_a_tied_head_stays_tied(pools):
    def run():
        model = tied()
        tp.parallelize_module(model, None, llama_plan(model))
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return model.lm_head.weight is model.model.embed_tokens.weight, len(names)

    assert all(same for same, _ in pools(2)(run))
