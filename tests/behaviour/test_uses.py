"""Layers used never or more than once, frozen for a while, in any mode, with gradients from anywhere."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from ingot import PAPER, SINGD
from tests.behaviour.training import (
    FAMILY,
    PLAIN,
    SPARSE,
    LanguageModel,
    Shared,
    Uses,
    assert_identical,
    assert_same,
    backward,
    batches,
    held,
    mlp,
    moved,
    pending,
    predict,
    squares,
    statistics,
    tokens,
    train,
    train_language,
    trained,
)

pytestmark = pytest.mark.usefixtures("float64")


# --- Layers used never, or more than once -------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_layer_unused_in_some_steps_stays_and_goes_on_as_if_they_had_not_been(optimizer_class):
    model, alone = nn.ModuleDict({"a": mlp(), "b": mlp(4, 3, 2)}), mlp(4, 3, 2)
    optimizer, of_alone = (optimizer_class(m, weight_decay=0.1, **SPARSE) for m in (model, alone))
    for x, uses_b in zip(batches(7), (True, True, False, False, True, False, True), strict=True):
        before = held(model.b, optimizer)
        optimizer.zero_grad()
        loss = squares(model.a(x))
        (loss + squares(model.b(x)) if uses_b else loss).backward()
        optimizer.step()
        if not uses_b:
            assert_identical(held(model.b, optimizer), before)
            continue
        of_alone.zero_grad()
        squares(alone(x)).backward()
        of_alone.step()
    assert_same(held(model.b, optimizer), held(alone, of_alone))
    assert optimizer.state[model.b[0].weight]["steps"] == 4
    assert optimizer.state[model.a[0].weight]["steps"] == 7


@pytest.mark.parametrize("tied", [False, True])
def test_uses_in_one_forward_add_up_and_make_one_step(tied):
    model = Shared(tied)
    optimizer, uses = SINGD(model, **PLAIN), Uses(*{model.first, model.second})
    backward(model, *batches(1))
    u, g = statistics(optimizer, model.first.weight)
    torch.testing.assert_close(u, uses.u(1.0, float(not tied)))
    torch.testing.assert_close(g, uses.g(terms=6))
    optimizer.step()
    assert optimizer.state[model.first.weight]["steps"] == optimizer.state[model.first.weight]["updates"] == 1


@pytest.mark.parametrize(("passes", "terms"), [(1, 6), (2, 12)])
def test_several_forwards_belong_to_the_same_terms_if_one_backward_follows(passes, terms):
    """Two losses in one sum are places of the same terms; two backward passes are more terms."""
    model = nn.Linear(4, 3)
    optimizer, uses = SINGD(model, **PLAIN), Uses(model)
    losses = [squares(model(x)) for x in batches(2)]
    for loss in [sum(losses)] if passes == 1 else losses:
        loss.backward()
    u, g = statistics(optimizer, model.weight)
    torch.testing.assert_close(u, uses.u(1.0, 1.0))
    torch.testing.assert_close(g, uses.g(terms))
    optimizer.step()
    assert optimizer.state[model.weight]["steps"] == 1


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_two_tied_modules_are_trained_like_one_that_is_used_twice(optimizer_class):
    once, twice = (Shared(tied, bias=False) for tied in (True, False))
    assert_same(train(once, optimizer_class(once), 5), train(twice, optimizer_class(twice), 5))


def test_an_embedding_tied_with_its_head_makes_one_step_with_both_statistics():
    model = LanguageModel()
    optimizer = SINGD(model, **PLAIN)
    of_head, of_embedding = Uses(model.head), Uses(model.embedding)
    predict(model, tokens())
    ((a, out),), ((_, embedded),) = of_head.seen, of_embedding.seen
    a, g, back = (x.flatten(0, 1) for x in (a, out.grad, embedded.grad))
    words = one_hot(tokens().flatten(), 7).double()
    # The head's matrix is the layer's: the embedding's inputs stand on its output side.
    u_1, g_1 = a.mT @ a / 18, 6 * g.mT @ g
    u_2, g_2 = 6 * back.mT @ back, words.mT @ words / 18
    # What moves from one factor of the second product to the other makes it weigh the same on both sides.
    move = ((g_1.trace() * u_2.trace()) / (u_1.trace() * g_2.trace())).sqrt()
    torch.testing.assert_close(statistics(optimizer, model.head.weight), (u_1 + u_2 / move, g_1 + g_2 * move))
    train_language(model, optimizer)
    assert optimizer.state[model.head.weight]["steps"] == 3
    assert set(optimizer.state) == set(model.parameters())


def test_a_bias_that_two_layers_share_makes_one_step():
    model = mlp(4, 4, 4)
    model[2].bias = model[0].bias
    before = model[0].bias.detach().clone()
    settings = PLAIN | {"lr": 0.1, "precond_lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}
    optimizer = SINGD(model, **settings)  # whose factors stay the identity
    backward(model, *batches(1))
    optimizer.step()
    torch.testing.assert_close(model[0].bias.detach(), before - 0.1 * model[0].bias.grad)


# --- Frozen parameters --------------------------------------------------------------------------------------


def test_frozen_parameters_belong_to_the_optimizer_as_with_adamw():
    model = mlp()
    model[0].requires_grad_(False)
    assert trained(SINGD(model)) == trained(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_backbone_that_is_unfrozen_later_is_preconditioned_weight_and_bias_together(optimizer_class):
    def run(frozen_at_construction: bool) -> dict:
        model = mlp()
        model[0].requires_grad_(not frozen_at_construction)
        optimizer = optimizer_class(model)
        model[0].requires_grad_(False)
        before = held(model, optimizer)
        assert moved(before, train(model, optimizer)) == {"2.weight", "2.bias"}
        assert not optimizer.state.get(model[0].weight)
        model[0].requires_grad_(True)
        after = train(model, optimizer)
        assert moved(before, after) == set(before)
        return after

    after = run(True)
    assert_same(after, run(False))
    (_, of_weight), (_, of_bias) = after["0.weight"], after["0.bias"]
    assert [of_weight[name].numel() for name in optimizer_class.rule.names] == [25, 25]
    assert set(of_bias) == {"momentum_buffer"}


@pytest.mark.parametrize("when", ["before construction", "after it", "in the middle of training"])
@pytest.mark.parametrize("settings", [{}, PAPER], ids=["default", "paper"])
def test_a_bias_frozen_alone_never_moves(when, settings):
    model = mlp()
    model[0].bias.requires_grad_(when != "before construction")
    optimizer = SINGD(model, weight_decay=0.1, **settings)
    if when == "in the middle of training":
        train(model, optimizer)
    model[0].bias.requires_grad_(False)
    before = held(model, optimizer)
    after = train(model, optimizer)
    assert moved(before, after) == {"0.weight", "2.weight", "2.bias"}
    assert_identical(after["0.bias"], before["0.bias"])
    assert "K" in after["0.weight"][1]


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_a_weight_frozen_for_some_steps_stays_with_its_factors_while_its_bias_is_trained(optimizer_class):
    model = mlp()
    optimizer = optimizer_class(model, weight_decay=0.1)
    before = train(model, optimizer)
    model[0].weight.requires_grad_(False)
    after = train(model, optimizer)
    assert_identical(after["0.weight"], before["0.weight"])
    assert moved(before, after) == {"0.bias", "2.weight", "2.bias"}
    model[0].weight.requires_grad_(True)
    assert moved(after, train(model, optimizer)) == set(after)
    assert optimizer.state[model[0].weight]["steps"] == optimizer.state[model[0].weight]["updates"] == 6


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_of_a_frozen_layers_input_is_saved(frozen):
    model, saved = mlp(), []
    optimizer = SINGD(model)
    model[0].requires_grad_(not frozen)
    x = next(batches(1)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        output = model(x)
    assert (x.data_ptr() in saved) is not frozen
    squares(output).backward()
    assert pending(optimizer) == [not frozen, True]


# --- Modes --------------------------------------------------------------------------------------------------


def test_training_in_eval_mode_is_training():
    one, other = mlp(), mlp().eval()
    assert_identical(train(one, SINGD(one)), train(other, SINGD(other)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_and_after_a_backward_pass_changes_nothing(mode):
    @mode()
    def evaluate(model: nn.Module, x: Tensor) -> None:
        model.eval()(x)
        model.train()

    def between(model: nn.Module, x: Tensor) -> None:
        loss = squares(model(x))
        evaluate(model, 2 * x)
        loss.backward()
        evaluate(model, 3 * x)

    one, other = mlp(), mlp()
    expected = train(one, SINGD(one, **PLAIN))
    assert_identical(train(other, SINGD(other, **PLAIN), backward=between), expected)


# --- Gradients from anywhere --------------------------------------------------------------------------------


def write_gradients(loss: Tensor, model: nn.Module) -> None:
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


def discriminator_loss(generator: nn.Module, discriminator: nn.Module, real: Tensor, z: Tensor) -> Tensor:
    return (softplus(-discriminator(real)) + softplus(discriminator(generator(z).detach()))).mean()


def alternate(way: str) -> list[dict]:
    generator, discriminator = pair = mlp(2, 5, 4), mlp(4, 5, 1)
    of_g, of_d = (SINGD(model, **PLAIN) for model in pair)
    for real, z in zip(batches(4), batches(4, 6, 2), strict=True):
        discriminator_loss(*pair, real, z).backward()
        of_d.step()
        discriminator.requires_grad_(way != "frozen")
        loss = softplus(-discriminator(generator(z))).mean()
        write_gradients(loss, generator) if way == "grad" else loss.backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        discriminator.requires_grad_(True)
    return [held(generator, of_g), held(discriminator, of_d)]


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_adversaries_take_the_same_steps_however_the_generators_gradient_comes(way):
    for one, other in zip(alternate(way), alternate("frozen"), strict=True):
        assert_same(one, other)


def test_the_generators_gradient_leaves_the_discriminators_statistics_untouched():
    generator, discriminator = pair = mlp(2, 5, 4), mlp(4, 5, 1)
    of_g, of_d = (SINGD(model, **PLAIN) for model in pair)
    (real,), (z,) = batches(1), batches(1, 6, 2)
    discriminator_loss(*pair, real, z).backward()
    before = [statistics(of_d, weight) for weight in of_d._layers]
    write_gradients(softplus(-discriminator(generator(z))).mean(), generator)
    assert_identical([statistics(of_d, weight) for weight in of_d._layers], before)
    assert pending(of_g) == [True, True]


@pytest.mark.parametrize("optimizer_class", FAMILY)
def test_gradients_written_by_hand_make_the_steps_of_a_backward_pass(optimizer_class):
    one, other = mlp(), mlp()
    by_hand = train(
        one, optimizer_class(one), backward=lambda model, x: write_gradients(squares(model(x)), model)
    )
    assert_same(by_hand, train(other, optimizer_class(other)))


def test_saliency_maps_before_and_after_a_backward_pass_change_nothing():
    def between(model: nn.Module, x: Tensor) -> None:
        loss = squares(model(x))
        for scale in (2, 3):
            image = (scale * x).requires_grad_()
            torch.autograd.grad(squares(model(image)), image)
            if scale == 2:
                loss.backward()

    one, other = mlp(), mlp()
    expected = train(one, SINGD(one, **PLAIN))
    assert_identical(train(other, SINGD(other, **PLAIN), backward=between), expected)


def test_functional_transforms_through_the_model_leave_no_trace():
    model = nn.Sequential(mlp(), nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 2), nn.Flatten())
    optimizer = SINGD(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    (x,) = batches(1)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return squares(torch.func.functional_call(model, parameters, (sample.unsqueeze(0),)))

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert not any(pending(optimizer))
    backward(model, x)
    assert all(pending(optimizer))
    for name, p in model.named_parameters():
        torch.testing.assert_close(per_sample[name].mean(0), p.grad)


@pytest.mark.parametrize(
    ("make", "names", "inputs"),
    [
        (lambda: nn.Linear(4, 3), ["input"], [*batches(1)]),
        (lambda: nn.Conv2d(2, 3, 2), ["input"], [*batches(1, 6, 2, 3, 3)]),
        (lambda: nn.ConvTranspose1d(2, 3, 2), ["input"], [*batches(1, 6, 2, 3)]),
        (lambda: nn.Embedding(7, 3), ["input"], [tokens()]),
        (lambda: nn.MultiheadAttention(4, 2), ["query", "key", "value"], [*batches(3, 6, 2, 4)]),
    ],
    ids=["linear", "convolution", "transposed", "embedding", "attention"],
)
def test_inputs_may_be_given_by_name(make, names, inputs):
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]

    def run(by_name: bool) -> dict:
        def backward(layer: nn.Module, _: Tensor) -> None:
            output = layer(**dict(zip(names, inputs, strict=True))) if by_name else layer(*inputs)
            squares(output[0] if isinstance(output, tuple) else output).backward()
            assert all(pending(optimizer))

        torch.manual_seed(0)
        layer = make()
        optimizer = SINGD(layer, **PLAIN)
        return train(layer, optimizer, backward=backward)

    assert_identical(run(True), run(False))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 5), (6, 4)),
        (lambda: nn.Linear(4, 5), (6, 3, 4)),
        (lambda: nn.Conv2d(4, 5, 2), (6, 4, 3, 3)),
    ],
    ids=["2-D", "3-D", "convolution"],
)
def test_activations_in_place_change_nothing(make, shape):
    def run(in_place: bool) -> dict:
        torch.manual_seed(0)
        model = nn.Sequential(make(), nn.ReLU(in_place), nn.Flatten(), nn.LazyLinear(3))
        model(torch.randn(shape))
        return train(model, SINGD(model, **PLAIN), 3, *shape)

    after = run(True)
    assert_same(after, run(False))
    assert after["0.weight"][1]["updates"] == 3


@dataclass
class Output:
    hidden: Tensor
    last: Tensor


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (lambda *x: x, lambda x: x[1]),
        (Output, lambda x: x.last),
        (lambda h, y: {"y": [h, y]}, lambda x: x["y"][1]),
    ],
    ids=["tuple", "dataclass", "dict"],
)
def test_outputs_may_have_any_form(kind, last):
    class Parts(nn.Sequential):
        def forward(self, x: Tensor):
            hidden = self[0](x)
            return kind(hidden, self[2](self[1](hidden)))

    model, plain = Parts(*mlp()), mlp()
    after = train(model, SINGD(model), backward=lambda model, x: squares(last(model(x))).backward())
    assert_same(after, train(plain, SINGD(plain)))


@pytest.mark.parametrize("of", ["inputs", "weights"])
def test_a_penalty_on_gradients_is_differentiated_as_without_the_optimizer(of):
    def penalised(model: nn.Module, x: Tensor) -> None:
        out = squares(model(x.requires_grad_()))
        wanted = [x] if of == "inputs" else list(model.parameters())
        penalty = sum(g.square().sum() for g in torch.autograd.grad(out, wanted, create_graph=True))
        (out + penalty).backward()

    def both(model: nn.Module, x: Tensor) -> None:
        plain = mlp()
        plain.load_state_dict(model.state_dict())
        penalised(plain, x)
        penalised(model, x)
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])

    model = mlp()
    before = held(model, optimizer := SINGD(model))
    after = train(model, optimizer, backward=both)
    assert moved(before, after) == set(before)
    assert all(p.isfinite().all() for p in model.parameters())
    assert after["0.weight"][1]["updates"] == 3
