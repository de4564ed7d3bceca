"""The models and the data: the same everywhere, real, and of the shapes that they promise."""

import hashlib
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import minidist as md

CONSTRAINTS = (Path(__file__).parents[1] / "constraints.txt").read_text()

MODELS = {
    "mlp": lambda seed: md.zoo.mlp(64, 32, 10, seed=seed),
    "convnet": lambda seed: md.zoo.convnet(seed=seed),
    "Transformer": lambda seed: md.zoo.Transformer(seed=seed),
    "Decoder": lambda seed: md.zoo.Decoder(seed=seed),
}


def test_a_seed_gives_one_model_whatever_was_drawn_before_and_changes_no_later_draw():
    for make in MODELS.values():
        first = make(0).state_dict()
        torch.manual_seed(5)
        torch.rand(3)
        state = torch.get_rng_state()
        again, other = make(0).state_dict(), make(1).state_dict()
        assert torch.equal(torch.get_rng_state(), state)
        assert list(first) == list(again) == list(other)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)


def test_models_map_what_they_say_to_what_they_say():
    images, pieces = torch.rand(5, 64), torch.randint(256, (3, 20))
    assert md.zoo.mlp(64, 32, 10)(images).shape == (5, 10)
    assert md.zoo.mlp(64, 10)(images).shape == (5, 10)
    assert md.zoo.convnet(channels=3)(images).shape == (5, 10)
    assert md.zoo.Transformer()(pieces).shape == md.zoo.Decoder()(pieces).shape == (3, 20, 256)
    with pytest.raises(ValueError, match=r"at least an input and an output size, not \(64,\)"):
        md.zoo.mlp(64)


def test_the_transformer_is_tied_and_no_model_sees_a_later_byte():
    model = md.zoo.Transformer(vocabulary=50, length=12, width=16, heads=4, layers=3).double()
    assert model.head.weight is model.tokens.weight
    assert sum(name.endswith("qkv.weight") for name, _ in model.named_parameters()) == 3
    pieces = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    other = pieces.clone()
    other[:, 7] = (other[:, 7] + 1) % 50
    for each in model, md.zoo.Decoder(50).double():
        before, after = each(pieces), each(other)
        torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
        assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).gt(1e-6).all()


def test_positions_are_those_that_are_given():
    tokens = md.zoo.text(8)[0][:3]
    own = torch.tensor(
        [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4], [4, 5, 6, 7, 3, 2, 1, 0]]
    )
    transformer = md.zoo.Transformer(length=8)
    first = transformer.sequential()[0]
    models = transformer, md.zoo.Decoder(), lambda x, positions: first((x, positions))
    for model in models:
        each = torch.cat([model(x[None], at) for x, at in zip(tokens, own, strict=True)])
        torch.testing.assert_close(model(tokens, own), each)
    for model, alone in zip(models, (*models[:2], first), strict=True):
        assert torch.equal(model(tokens, own[0]), alone(tokens))
        assert not torch.allclose(model(tokens, own)[1], alone(tokens)[1])


def test_rotary_positions_are_relative():
    model, tokens = md.zoo.Decoder().double(), md.zoo.text()[0][:3]
    at = torch.arange(32)
    close = dict(rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(tokens, at + 1000), model(tokens), **close)
    assert (model(tokens, 2 * at) - model(tokens)).abs().max() > 1e-3
    x, far = torch.randn(1, 2, 32, 16), at + 100_001
    narrow = md.zoo.rotate(x.bfloat16(), far).float()
    torch.testing.assert_close(narrow, md.zoo.rotate(x, far), rtol=0.02, atol=0.02)


def test_grouped_queries_are_whole_heads_with_repeated_keys():
    model, whole = md.zoo.Decoder(heads=8, kv_heads=2), md.zoo.Decoder(heads=8, kv_heads=8)
    state = model.state_dict()
    for name in state:
        if name.endswith(("k.weight", "v.weight")):
            heads = state[name].unflatten(0, (2, 4))  # (Hkv, D, C)
            state[name] = heads.repeat_interleave(4, 0).flatten(0, 1)
    whole.load_state_dict(state)
    tokens = md.zoo.text()[0][:3]
    torch.testing.assert_close(model(tokens), whole(tokens))


@pytest.mark.parametrize("make", [md.zoo.Transformer, md.zoo.Decoder])
def test_a_language_model_learns_more_than_how_frequent_bytes_are(make):
    inputs, targets = md.zoo.text()
    often = targets.flatten().bincount() / targets.numel()
    frequent = -often[often > 0].log().mul(often[often > 0]).sum()  # 3.38: what it costs to know it
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, y in zip(inputs.split(32)[:120], targets.split(32), strict=False):
        losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert torch.stack(losses[-10:]).mean() < frequent - 0.4


def test_the_digits_are_scikit_learns_in_one_order():
    images, labels = md.zoo.digits(torch.float64)
    assert images.shape == (1797, 64) and labels.shape == (1797,)
    assert (images.min(), images.max()) == (0, 1) and images.dtype == torch.float64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    again, same = md.zoo.digits(torch.float64)
    assert torch.equal(images, again) and torch.equal(labels, same)
    assert md.zoo.digits()[0].dtype == torch.float32
    from sklearn.datasets import load_digits

    pairs = zip(*load_digits(return_X_y=True), strict=True)
    expected = sorted((*(image / 16).tolist(), label) for image, label in pairs)
    found = zip(images.tolist(), labels.tolist(), strict=True)
    assert sorted((*image, label) for image, label in found) == expected


def test_each_target_is_the_byte_after_its_input():
    page = torch.addmm.__doc__.encode()
    for length in 1, 20, 32:
        inputs, targets = md.zoo.text(length)
        assert inputs.shape == targets.shape == (len(inputs), length)
        assert len(inputs) * length > 100_000
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert 0 <= inputs.min() and inputs.max() <= 255
        assert torch.equal(md.zoo.text(length)[0], inputs)
        rows = torch.cat([inputs, targets[:, -1:]], 1).tolist()
        assert sum(bytes(row) in page for row in rows) > 20  # bytes of it follow one another
        assert not torch.equal(inputs[1], targets[0])  # shuffled


PINNED = "torch==" + torch.__version__.partition("+")[0]


@pytest.mark.skipif(PINNED not in CONSTRAINTS, reason="the stored outputs are of the pinned torch")
def test_the_text_is_that_of_the_stored_outputs():
    """Whatever the version of Python, and whatever else has been imported."""
    assert hashlib.sha256(md.zoo.text(1)[0].numpy().tobytes()).hexdigest()[:8] == "a934d395"


def test_a_transformer_as_a_sequence_is_the_same():
    model = md.zoo.Transformer(layers=3)
    layers = model.sequential()
    tokens = md.zoo.text()[0][:4]
    assert torch.equal(layers(tokens), model(tokens)) and len(layers) == 6
    assert list(map(id, layers.parameters())) == list(map(id, model.parameters()))


def test_a_sleeping_layer_takes_its_time_forward_and_backward():
    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    x = torch.randn(4, 3, requires_grad=True)
    layer = md.zoo.Sleep(5)
    y = layer(x)
    assert torch.equal(y, x)
    assert timed(lambda: layer(x)) >= 0.02
    assert timed(y.sum().backward) >= 0.04
    assert torch.equal(x.grad, torch.ones_like(x)) and layer.weight.grad == 12
    y = layer(x.detach())  # the first layer: all of backward is for its weights
    assert timed(y.sum().backward) >= 0.04
    with md.measure.Timeline() as line:
        md.zoo.Sleep(1, parameters=5)(x).sum().backward()
    assert line.seconds()["compute"] >= 0.012
    assert {span.name for span in line.spans} == {"forward", "backward"}
