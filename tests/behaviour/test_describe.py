"""What describe tells."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ingot import IKFAC, KFAC, PAPER, SINGD
from tests.behaviour.training import mlp, tokens, train

pytestmark = pytest.mark.usefixtures("float64")


class Mixed(nn.Module):
    """Layers with one and with several matrices, beside parameters that AdamW trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, 4), nn.Parameter(torch.zeros(3, 4))
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.depthwise, self.head = nn.Conv1d(4, 8, 2, groups=4), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position
        x = self.norm(self.attention(x, x, x, need_weights=False)[0])
        return self.head(self.depthwise(x.mT).flatten(1))


def bytes_of(state: dict) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (SINGD, {}),
        (SINGD, {"precond_momentum": 0.5}),
        (SINGD, {"factor_dtype": torch.bfloat16}),
        (SINGD, {"factor_dtype": torch.bfloat16, "precond_momentum": 0.5}),
        (SINGD, {"momentum": 0.0}),
        (SINGD, {"structure": ("diagonal", "hierarchical(2,2)")}),
        (SINGD, PAPER),
        (IKFAC, {}),
        (KFAC, {}),
        (KFAC, PAPER),
    ],
)
def test_the_memory_planned_before_the_first_step_is_what_is_held_after_it(optimizer_class, settings, dtype):
    torch.set_default_dtype(torch.float32)  # which torch's AdamW counts its steps in
    model = Mixed().to(dtype)
    optimizer, adamw = optimizer_class(model, **settings), torch.optim.AdamW(model.parameters(), lr=0.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    planned = {row.name: row.state_bytes for row in optimizer.describe().rows}
    cross_entropy(model(tokens()), tokens()[:, 0]).backward()
    optimizer.step()
    adamw.step()
    sgd.step()
    description = optimizer.describe()
    assert [row.name for row in description.rows] == [name for name, _ in model.named_parameters()]
    for row, p in zip(description.rows, model.parameters(), strict=True):
        assert planned[row.name] == row.state_bytes, row.name
        assert row.state_bytes - row.cached_bytes == bytes_of(optimizer.state[p]), row.name
        assert row.adamw_bytes == bytes_of(adamw.state[p])
        assert row.sgd_bytes == bytes_of(sgd.state[p])


def test_describe_prints_a_table_of_all_parameters():
    model = Mixed()
    head, rule, *lines, blank, summary = str(SINGD(model).describe()).splitlines()
    assert head.split() == ["parameter", "shape", "trained", "by", "K", "C", "state"]
    assert set(rule) == {"-", " "}
    names = [name for name, _ in model.named_parameters()]
    assert [line.split()[0] for line in lines] == names
    by_adamw = {name for name, line in zip(names, lines, strict=True) if line.split()[2] == "AdamW"}
    assert by_adamw == {"position", "norm.weight", "norm.bias"}
    assert blank == ""
    assert "of the trained parameters are preconditioned" in summary
    assert "of AdamW's" in summary


def test_describe_tells_the_share_of_preconditioned_parameters():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    model[2].weight.requires_grad_(False)
    description = SINGD(model, [*model[0].parameters(), model[1].weight, *model[2].parameters()]).describe()
    by = [row.trained_by for row in description.rows]
    assert by == ["SINGD", "with its weight", "AdamW", "not here", "frozen", "AdamW"]
    assert [row.state_bytes > 0 for row in description.rows] == [True, True, True, False, False, True]
    assert description.preconditioned == 25 / (25 + 5 + 2)
    assert "78.1%" in str(description)


def test_describe_follows_a_bias_that_was_trained_without_its_weight_for_a_while():
    model = mlp()
    optimizer = SINGD(model)
    before = [row.trained_by for row in optimizer.describe().rows]
    train(model, optimizer)
    model[0].weight.requires_grad_(False)
    train(model, optimizer)
    assert [row.trained_by for row in optimizer.describe().rows[:2]] == ["frozen", "AdamW"]
    model[0].weight.requires_grad_(True)
    train(model, optimizer)
    assert [row.trained_by for row in optimizer.describe().rows] == before
    assert optimizer.describe().preconditioned == 1
