"""The benchmarks on models so small that only their own work is left to test."""

import random

import pytest
import torch
from torch import nn

import benchmarks.__main__ as command
import ingot
from benchmarks import alone, contenders, fast_paths, report, timing
from benchmarks.contenders import Contender
from benchmarks.measured import Results
from benchmarks.workloads import GPT, ViT, Workload

IMAGES = Workload(
    title="Tiny images",
    model=lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ),
    batch=lambda: (torch.randn(4, 2, 6, 6), torch.randint(3, (4,))),
    rounds=1,
    turn=3,
    slow_rounds=2,
)
TOKENS = Workload(
    title="Tiny tokens",
    model=lambda: GPT(d=8, depth=1, heads=2, length=6, words=5),
    batch=lambda: (torch.randint(5, (2, 6)), torch.randint(5, (2, 6))),
    rounds=1,
    turn=1,
    per_token=True,
)


@pytest.fixture
def tiny(monkeypatch):
    """Workloads, rounds and peers for which no package but torch is needed."""
    monkeypatch.setattr(command, "WORKLOADS", {"mlp": IMAGES, "gpt": TOKENS})
    monkeypatch.setattr(timing, "MIN_WINDOW", 2)
    monkeypatch.setattr(contenders, "PEERS", ("singd",))
    monkeypatch.setattr(fast_paths, "PATHS", fast_paths.PATHS[:1])


def find(title, every=1, per_token=False):
    return next(c for c in contenders.contenders([every], per_token) if c.title == title)


def singd(every, **settings):
    def make(model):
        return ingot.SINGD(model, structure="diagonal", precond_every=every, precond_warmup=0)

    return Contender("ours", make, "ingot", "diagonal", every, splits=True, **settings)


# --- Each in a process of its own ------------------------------------------------------------------------


def test_an_iteration_is_the_mean_over_an_interval_of_medians(monkeypatch):
    """So that an update of the factors counts as often as it comes, and an interruption does not."""
    monkeypatch.setattr(alone, "WORKLOADS", {"mlp": IMAGES})
    done = []

    def train(self, iterations):
        for _ in range(iterations):
            number = len(done)
            done.append(number)
            seconds = 0.021 if number % 20 == 0 else 0.001
            self.iteration.append(9.0 if number == 75 else seconds)

    monkeypatch.setattr(timing.Contestant, "train", train)
    assert alone.iteration("mlp", alone.DEFAULTS, 3) == pytest.approx(2.0)
    assert len(done) == 100


def test_processes_take_turns_with_an_optimizer_each(monkeypatch):
    told = []
    monkeypatch.setattr(alone, "TITLES", ("AdamW", alone.DEFAULTS))
    found = alone.measure("mlp", 2, 1, told.append, intervals=1)
    assert len(told) == 4
    assert sorted(found) == ["AdamW", alone.DEFAULTS]
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())


# --- Times ------------------------------------------------------------------------------------------------


def test_counts_the_state_that_an_optimizer_keeps():
    batches = [TOKENS.batch()]

    def state_bytes(title):
        return timing.prepare(TOKENS.model(), find(title, per_token=True), batches).state_bytes

    sizes = [p.numel() for p in TOKENS.model().parameters()]
    assert state_bytes("SGD momentum") == 4 * sum(sizes)
    assert state_bytes("AdamW") == 4 * (2 * sum(sizes) + len(sizes))  # a counter for each parameter, too
    for package in ("official singd", "ingot SINGD"):
        assert state_bytes(f"{package} dense") > state_bytes(f"{package} diagonal") > 4 * sum(sizes)


class Failing(torch.optim.SGD):
    """Fails at its step of a number."""

    def __init__(self, model, at):
        super().__init__(model.parameters(), lr=1e-3)
        self.left = at

    def step(self, closure=None):
        self.left -= 1
        if not self.left:
            raise RuntimeError("no more")


@pytest.mark.parametrize("at", [1, 5], ids=["while it is prepared", "in a round"])
def test_a_peer_that_fails_is_left_out_and_ours_must_not(at):
    def failing(package):
        return Contender("failing", lambda model: Failing(model, at), package)

    said = []
    found = timing.measure(IMAGES, [failing("a peer"), singd(2)], 1, said.append)
    assert [one.title for one in found.timings] == ["ours"]
    assert "failing failed, and is left out" in said
    with pytest.raises(RuntimeError, match="no more"):
        timing.measure(IMAGES, [failing("ingot"), singd(2)], 1)


@pytest.mark.parametrize(
    ("every", "window"), [((1,), 10), ((3,), 12), ((1, 10), 10), ((25,), 25), ((4, 6), 12)]
)
def test_a_round_is_whole_intervals_of_all(every, window):
    assert timing.whole_intervals([singd(one) for one in every]) == window


def test_steps_with_an_update_are_those_that_update():
    class Tells(ingot.SINGD):
        def step(self, closure=None):
            before = self._updates()
            super().step(closure)
            updated.append(self._updates() > before)

        def _updates(self):
            return sum(state.get("updates", 0) for state in self.state.values())

    updated = []

    def make(model):
        return Tells(model, structure="diagonal", precond_every=3, precond_warmup=0)

    contender = Contender("ours", make, "ingot", "diagonal", 3, splits=True)
    contestant = timing.prepare(IMAGES.model(), contender, [IMAGES.batch()])
    for number in range(2):
        timing.take_turns([contestant], window=6, turn=4, shuffler=random.Random(number))
    # Instead of seconds, whether there was an update: then their means must be one and zero.
    kinds = contestant.kinds([1e-3 * was for was in updated], window=6)
    assert len(updated) == contender.warmup + 12
    assert kinds.update == [1, 1]
    assert kinds.plain == [0, 0]
    assert kinds.at(10) == [0.1, 0.1]


def test_slow_ones_take_part_in_the_first_rounds_and_are_weighed_for_each_interval():
    slow = singd(2, slow=True, reported=(1, 10))
    fast = [find("SGD momentum"), find("AdamW"), singd(10)]
    found = timing.measure(IMAGES, [*fast, slow], rounds=IMAGES.slow_rounds + 1).timings
    assert [timing_.every for timing_ in found] == [None, None, 10, 1, 10]
    *others, at_1, at_10 = found
    assert all(len(one.iterations()) == IMAGES.slow_rounds + 1 for one in others)
    assert len(at_1.iterations()) == len(at_10.iterations()) == IMAGES.slow_rounds
    assert at_1.step.plain == []
    assert at_1.steps() == at_10.step.update
    for mean, update, plain in zip(at_10.steps(), at_10.step.update, at_10.step.plain, strict=True):
        assert mean == pytest.approx((update + 9 * plain) / 10)
    for one in found:
        assert one.finite
        assert all(0 < step < whole for step, whole in zip(one.steps(), one.iterations(), strict=True))


def test_says_which_optimizer_diverged():
    wild = Contender("wild", lambda model: torch.optim.SGD(model.parameters(), lr=1e30))
    times = timing.measure(IMAGES, [find("SGD momentum"), find("AdamW"), wild], rounds=1)
    assert [one.finite for one in times.timings] == [True, True, False]
    assert report.tables.times_table(times).endswith("distrust the times of: wild.\n")


# --- Contenders -------------------------------------------------------------------------------------------


def test_every_structure_is_measured_beside_the_official_one_at_every_interval():
    found = contenders.contenders([1, 10], per_token=False)
    for structure in contenders.OFFICIAL_NAMES:
        for package in ("ingot", "singd"):
            intervals = [
                every
                for c in found
                if (c.package, c.structure) == (package, structure)
                for every in c.reported or (c.every,)
            ]
            assert intervals == [1, 10]


def test_missing_peers_are_left_out_and_named(monkeypatch):
    monkeypatch.setattr(contenders, "PEERS", ("singd", "a_peer_that_is_not_there"))
    conditions = command.conditions(threads=1)
    assert conditions["peers"]["a_peer_that_is_not_there"] is None
    assert "skipped: a_peer_that_is_not_there." in report.environment(conditions)
    monkeypatch.setattr(contenders, "PEERS", ())
    assert {c.package.split(",")[0].split()[0] for c in contenders.contenders([1], False)} == {
        "torch",
        "ingot",
    }


@pytest.mark.parametrize(
    ("package", "title"),
    [("pytorch_optimizer", "SOAP"), ("pytorch_optimizer", "Shampoo"), ("heavyball", "PSGD")],
)
@pytest.mark.filterwarnings("ignore")  # a peer may warn of what it likes
def test_peers_that_are_installed_train(package, title):
    pytest.importorskip(package)
    contestant = timing.prepare(TOKENS.model(), find(f"{title} of {package}"), [TOKENS.batch()])
    before = {name: p.clone() for name, p in contestant.model.named_parameters()}
    contestant.train(1)
    after = dict(contestant.model.named_parameters())
    rest = {name for name in before if torch.equal(before[name], after[name])}
    assert rest <= {"blocks.0.k.bias"}  # which attention does not notice
    assert contestant.state_bytes > 0


def test_muon_trains_every_parameter():
    model = ViT(d=12, depth=1, heads=2, size=8, patch=4, classes=3)
    muon = find("Muon").make(model)
    trained = [p for part in muon.parts for group in part.param_groups for p in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(model.parameters()))


# --- Command line -----------------------------------------------------------------------------------------


@pytest.mark.slow
# Of the compiler's own making.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_measures_stores_and_renders_again(tiny, tmp_path, capsys, monkeypatch):
    out = tmp_path / "new" / "bench"
    arguments = ["--out", str(out)]
    few = ["--rounds", "1", "--every", "1", "2", "--dims", "32", "64"]
    few += ["--only", "official singd diagonal", "ingot SINGD diagonal"]
    monkeypatch.setattr(
        alone, "_in_a_process", lambda name, title, *_: 3.0 if title == alone.DEFAULTS else 2.0
    )
    command.main(["all", *few, *arguments])
    captured = capsys.readouterr()
    text = (out / "results.md").read_text()
    assert captured.out.strip() == text.strip()
    assert "gpt: round 1 of 1" in captured.err

    results = Results.load(out / "results.json")
    assert results.conditions["torch"] == torch.__version__
    assert list(results.times) == list(results.memory) == ["mlp", "gpt"]
    titles = ["SGD momentum", "AdamW", "official singd diagonal", "ingot SINGD diagonal"]
    for model in results.times:
        for title in titles:
            assert f"| {title}" in text
            assert title in results.memory[model]
    assert results.alone["gpt"]["AdamW"] == [2.0]
    assert "| ingot SINGD, defaults | 1.50 [1.50, 1.50] | 1.50 [1.50, 1.50] |" in text
    assert results.scaling.dims == [32, 64]
    assert len(results.fast_paths) == 2

    for figure in (report.TIME_FIGURE, report.MEMORY_FIGURE):
        assert f"]({figure})" in text
        assert (out / figure).stat().st_size > 10_000
    monkeypatch.setattr(report, "write_figures", lambda *_: None)  # which takes longest, and is done
    command.main(["render", *arguments])
    assert capsys.readouterr().out.strip() == text.strip()


@pytest.mark.parametrize("wrong", [["nothing"], ["times", "--models", "lenet"], ["times", "--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        command.main(wrong)
    assert "error" in capsys.readouterr().err
