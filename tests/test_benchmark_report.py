"""Verdicts, exponents and tables from made-up measurements, for which it is known what should come out."""

import pytest

from benchmarks import report, tables, targets
from benchmarks.complexity import D2_LOG, KINDS, PAPER, expected_exponent, exponent
from benchmarks.contenders import DEFAULT_EVERY, DEFAULTS, OFFICIAL_NAMES
from benchmarks.measured import (
    Kinds,
    Memory,
    PathResult,
    Results,
    Scaling,
    Spread,
    Times,
    Timing,
    ratio,
    spread,
)
from ingot import SINGD

DIMS = [512, 1024, 2048]
CONDITIONS = {
    "date": "2000-01-01",
    "processor": "Abacus",
    "cores": 2,
    "threads": 1,
    "python": "3.14",
    "torch": "2.99",
    "ingot": "0.1",
    "peers": {"singd": "0.0.5", "heavyball": None},
}


def timing(title, package, structure, every, step, plain=None, other=10.0, rounds=3, state=10):
    """An optimizer whose iterations take 10 ms without their step."""
    plain = [] if plain is None else [plain] * rounds
    return Timing(
        title,
        package,
        structure,
        every,
        iteration=Kinds([other + step] * rounds, [other + p for p in plain]),
        step=Kinds([step] * rounds, plain),
        state_bytes=state,
        finite=True,
    )


def model_times(ours=1.0, official=4.0, rounds=3):
    found = [
        timing("SGD momentum", "torch", "", None, 2.0),
        timing("AdamW", "torch", "", None, 4.0, state=20),
    ]
    for structure in OFFICIAL_NAMES:
        for every in (1, 10):
            plain = None if every == 1 else 1.0
            for package, factor in (("ingot", ours), ("singd", official)):
                step = factor * (2 if every == 1 else 11)
                found.append(
                    timing(
                        f"{package} {structure}",
                        package,
                        structure,
                        every,
                        step,
                        plain and factor * plain,
                        rounds=rounds,
                    )
                )
    return Times("A model", found)


def growth(wrong=""):
    """Seconds as the paper's formulas say, one structure's being quadratic instead."""
    return Scaling(
        dims=DIMS,
        seconds={
            kind: {
                s: [1e-9 * (d**2.5 if s == wrong else PAPER[s][kind].value(d)) for d in DIMS] for s in PAPER
            }
            for kind in KINDS
        },
        largest_bytes={s: [4 * (d * d if s in ("dense", wrong) else 8 * d) for d in DIMS] for s in PAPER},
        state_bytes={s: [int(4 * PAPER[s]["storage"].value(d)) for d in DIMS] for s in PAPER},
        sgd_seconds=[1e-9 * d**2.25 for d in DIMS],
    )


def results(**changes):
    whole = {
        "conditions": CONDITIONS,
        "times": {model: model_times() for model in targets.MODELS},
        "memory": {
            model: {"AdamW": Memory(200, 1000, 1000), "ingot SINGD diagonal": Memory(101, 950, 1010)}
            for model in targets.MODELS
        },
        "alone": {"mlp": {"AdamW": [2.0, 4.0, 2.0], "ingot SINGD, defaults": [2.2, 4.8, 2.0]}},
        "scaling": growth(),
        "fast_paths": [PathResult("ones", "sums", "d = 3", [1.5, 2.0, 2.5], 1e-7)],
    }
    return Results(**whole | changes)


def verdict(found, claim, structure, model=""):
    [one] = [
        v
        for v in targets.verdicts(found)
        if (v.target.claim, v.target.structure, v.target.model) == (claim, structure, model)
    ]
    return one


# --- Numbers ----------------------------------------------------------------------------------------------


def test_ratios_are_taken_round_by_round_as_far_as_both_took_part():
    assert ratio([2.0, 8.0, 6.0], [1.0, 2.0, 3.0, 100.0]) == Spread(2.0, 2.0, 3.0)
    assert ratio([], [1.0]) is None
    assert spread([5.0]) == Spread(5.0, 5.0, 5.0)
    assert str(Spread(1.234, 1.0, 2.0)) == "1.23 [1.00, 2.00]"
    assert str(Spread(345.6, 300.0, 400.0)) == "346 [300, 400]"


def test_an_interval_is_one_update_and_the_rest_without():
    kinds = Kinds([11.0], [1.0])
    assert kinds.at(10) == [2.0]
    assert kinds.at(1) == kinds.at(None) == [11.0]
    assert Kinds([3.0], []).at(10) == [3.0]


def test_exponents_are_those_of_powers_and_more_with_a_logarithm():
    assert exponent(DIMS, [d**1.5 for d in DIMS]) == pytest.approx(1.5)
    assert 2.1 < expected_exponent(DIMS, D2_LOG) < 2.2


# --- Verdicts ---------------------------------------------------------------------------------------------


def test_speedups_over_the_official_package():
    found = results()
    for structure, reached in (("diagonal", True), ("triu_toeplitz", False)):
        one = verdict(found, "step at T=10, official / ingot", structure, "vit")
        assert one.measured.median == 4.0
        assert one.reached is reached
    one = verdict(found, "iteration at T=1, official / ingot", "diagonal", "mlp")
    assert one.measured.median == pytest.approx(18 / 12)
    assert one.reached
    assert verdict(found, "step without update, official / ingot", "dense", "gpt").measured.median == 4.0


def test_iterations_beside_first_order_optimizers():
    found = results()
    beside_sgd = verdict(found, "iteration at T=10, ingot / SGD", "diagonal", "vgg")
    assert beside_sgd.measured.median == pytest.approx((10 + (11 + 9) / 10) / 12)
    assert beside_sgd.reached
    slow = results(times={"vgg": model_times(ours=3.0)})
    assert verdict(slow, "iteration at T=10, ingot / SGD", "diagonal", "vgg").reached is False
    beside_adamw = verdict(slow, "iteration at T=10, ingot / AdamW", "diagonal", "vgg")
    assert beside_adamw.measured.median == pytest.approx(16 / 14)
    assert beside_adamw.reached is False
    assert verdict(slow, "iteration at T=10, ingot / AdamW", "diagonal", "mlp").reached is None


def test_defaults_beside_adamw_in_a_process_of_its_own():
    claim = f"iteration at T={DEFAULT_EVERY}, defaults / AdamW, each in a process of its own"
    structure = SINGD.default_structure
    of_mlp = verdict(results(), claim, structure, "mlp")
    assert of_mlp.measured.median == pytest.approx(1.1)
    assert of_mlp.reached
    assert verdict(results(), claim, structure, "gpt").reached is None
    slower = results(alone={"mlp": {"AdamW": [1.0], DEFAULTS: [1.16]}})
    assert verdict(slower, claim, structure, "mlp").reached is False
    assert "| ingot SINGD, defaults | 1.10 [1.05, 1.15] |" in broken(report.page(results(), ""))


def test_what_a_step_of_the_defaults_costs():
    times = {"mlp": model_times(), "gpt": model_times()}
    ours = timing(DEFAULTS, "ingot, defaults", SINGD.default_structure, DEFAULT_EVERY, 25.0, 5.0)
    times["mlp"].timings.append(ours)  # 16 ms an iteration, where AdamW takes 14
    found = broken(tables.cost_of_defaults(results(times=times)))
    assert found.splitlines()[2:] == [
        "| in turns with all others in one process | 1.14 [1.14, 1.14] | – |",
        "| each in a process of its own | 1.10 [1.05, 1.15] | – |",
    ]


def test_gaps_are_told_with_the_widest_one():
    found = tables.gaps_table(results(scaling=growth(wrong="diagonal")))
    assert "| dense | 0.00 | 0.00 | 0.00 |" in found
    assert "| diagonal | 0.50 | 1.50 | 1.50 |" in found
    assert "by 1.50 at most (diagonal, statistics)" in found
    assert "takes d^2.25 on this machine" in found


def test_never_slower_is_missed_where_one_is():
    slower = results(times={"mlp": model_times(), "gpt": model_times(ours=4.4)})
    claim = "step at T=1, official / ingot: never slower"
    assert verdict(slower, claim, "dense", "mlp").reached
    assert verdict(slower, claim, "dense", "gpt").reached is False


def test_memory_beside_adamw():
    found = results()
    assert verdict(found, "state, ingot / AdamW", "diagonal", "mlp").measured.median == pytest.approx(0.505)
    assert verdict(found, "peak memory at updates, ingot / AdamW", "diagonal", "mlp").reached
    more = {"mlp": {"AdamW": Memory(200, 1000, 1000), "ingot SINGD diagonal": Memory(120, 1021, 1000)}}
    found = results(memory=more)
    assert verdict(found, "state, ingot / AdamW", "diagonal", "mlp").reached is False
    assert verdict(found, "peak memory in training, ingot / AdamW", "diagonal", "mlp").reached is False


def test_growth_other_than_the_papers_is_missed():
    claims = [f"exponent of time ({kind}), difference to the paper's" for kind in KINDS]
    found, wrong = results(), results(scaling=growth(wrong="triu_toeplitz"))
    for claim in claims:
        assert verdict(found, claim, "triu_toeplitz").measured.median == pytest.approx(0, abs=1e-9)
        assert verdict(wrong, claim, "triu_toeplitz").reached is False
        assert verdict(wrong, claim, "dense").reached
    claim = "largest allocation in training, in d x d matrices"
    assert verdict(found, claim, "triu_toeplitz").reached
    assert verdict(wrong, claim, "triu_toeplitz").measured.median == 1
    assert verdict(wrong, claim, "triu_toeplitz").reached is False


def broken(text):
    """A page with plain spaces."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


# --- The page ---------------------------------------------------------------------------------------------


def test_results_are_the_same_after_storing(tmp_path):
    path = tmp_path / "deep" / "results.json"
    found = results()
    found.save(path)
    assert Results.load(path).times == found.times
    assert Results.load(path).memory == found.memory
    assert Results.load(path).fast_paths == found.fast_paths
    assert report.page(Results.load(path), "") == report.page(found, "")


def test_the_page_has_every_section_and_says_what_was_missed():
    text = broken(report.page(results(), images="images/"))
    assert "Abacus, 2 cores, 1 thread(s)" in text
    assert "skipped: heavyball." in text
    for heading in ("Targets", "Against the official package", "A model", "Memory", "Growth", "Fast paths"):
        assert f"\n## {heading}" in text
    assert "| triu_toeplitz: step at T=10, official / ingot | ✗ 4.00 (≥ 70) |" in text
    assert "| diagonal: step at T=10, official / ingot | ✓ 4.00 (≥ 2.5) |" in text
    assert "| ones, not sums | d = 3 | 2.00 [1.75, 2.25] | 1e-07 |" in text
    assert "| triu_toeplitz | ✓ 2.14 / 2.14 (d² log d) |" in text


def test_what_was_not_measured_has_no_section():
    text = report.page(Results(CONDITIONS, fast_paths=results().fast_paths), "")
    assert "## Fast paths" in text
    assert text.count("\n## ") == 1
    partly = broken(report.page(results(times={"mlp": model_times()}, memory={}), ""))
    assert "## Memory" not in partly
    assert "| ✓ 4.00 (≥ 2.5) | – | – | – |" in partly


def test_counts_of_targets():
    found = targets.verdicts(results(times={}, memory={}, alone={}, scaling=growth(wrong="diagonal")))
    measured = [v for v in found if v.measured]
    assert len(measured) == 3 * 6 + 5
    unknown = len(found) - len(measured)
    assert tables.verdict_counts(found) == f"19 of 23 reached, {unknown} were not measured"
    assert tables.verdict_counts(measured) == "19 of 23 reached"


def test_quartiles_and_both_kinds_of_steps_are_in_the_table_of_a_model():
    text = broken(tables.times_table(model_times()))
    assert "| AdamW | 1.17 [1.17, 1.17] | 2.00 [2.00, 2.00] | – | – | 1.00 |" in text
    assert "| ingot dense, T=10 | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 5.50 | 0.50 | 0.50 |" in text
