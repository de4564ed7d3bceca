"""Plans for models that many people train. Each is a dict: print it, change it.

With `sequence_parallel`, attention must take the number of tokens from its queries: what comes into
the block is this rank's part of the tokens.
"""

from typing import Any

from torch import nn

from minidist.tensor_parallel.styles import heads, qkv


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
    (name,) = _there(attention, "n_head", "num_heads")
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
    """For a model with the names of Llama, as Hugging Face has them: grouped queries, and an MLP
    with a gate. If its attention counts heads, it does so in `num_heads` and `num_key_value_heads`,
    or `n_heads` and `n_kv_heads`. Lesson: feature_splitting.

        model = LlamaForCausalLM(config)                    # the same on every rank
        plan = llama_plan(model)
        del plan["model.embed_tokens"], plan["lm_head"]     # both stay whole
        parallelize_module(model, None, plan)
        model(tokens, labels=tokens).loss.backward()

    So `labels=` and `generate` are those of one process, and an embedding may have `padding_idx`.
    (To sample, seed the ranks alike.) With `lm_head` split, a rank's logits are of its own tokens
    alone: `vocab_parallel_cross_entropy` takes them, `generate` and `labels=` do not.

    Hugging Face's attention counts nothing that could be checked: the number of ranks must divide
    `num_key_value_heads`. It takes the number of tokens from its input: no `sequence_parallel`.
    """
    block = "model.layers.*"
    names = "num_heads", "num_key_value_heads", "n_heads", "n_kv_heads"
    counted = _there(model.get_submodule("model.layers.0.self_attn"), *names)
    return {
        "model.embed_tokens": "vocabulary",
        f"{block}.*norm": "sequence",
        **({f"{block}.self_attn": heads(*counted)} if counted else {}),
        **{f"{block}.self_attn.{each}_proj": "columns" for each in "qkv"},
        f"{block}.self_attn.o_proj": "rows",
        f"{block}.mlp.gate_proj": "columns",
        f"{block}.mlp.up_proj": "columns",
        f"{block}.mlp.down_proj": "rows",
        "model.norm": "sequence",
        "lm_head": "vocabulary",
    }


def _there(module: nn.Module, *names: str) -> list[str]:
    return [name for name in names if hasattr(module, name)]
