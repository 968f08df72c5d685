"""The router's benchmark: presets, rows, gates that can fail, timing's sigma, the advice."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch

from solspark.bench import router_bench, router_session, runner
from solspark.bench.router_advice import (
    FASTER,
    INCONCLUSIVE,
    NOT_FASTER,
    Figure,
    advise,
    candidates,
    pick,
    starred,
    verdict,
    z_of,
)
from solspark.bench.router_blocks import (
    BLOCK_ROWS,
    GEOMETRIES,
    block_errors,
    block_forward,
    make_linear,
    make_weights,
    reference_block,
)
from solspark.bench.router_checks import router_checks
from solspark.bench.router_presets import (
    ALIASES,
    PRESETS,
    Preset,
    judge_rows,
    make_mask,
    make_router_inputs,
)
from solspark.bench.router_rows import ROWS, build_row, choose_ids, obstacles
from solspark.bench.router_timing import Sample, deadline, drift_of, repeats, sample_of
from solspark.bench.rows import read_rows
from solspark.router.backend import Platform

CPU = torch.device("cpu")
HERE = Platform("cpu", CPU)
QUICK = ["--iters", "2", "--warmup", "1", "--iters-s", "0", "--warmup-s", "0", "--commit", "abc"]


def inputs_of(name="tiny", dtype=torch.bfloat16):
    return make_router_inputs(PRESETS[name], CPU, dtype)


# The command


def test_the_whole_command_on_a_cpu(tmp_path, capsys):
    arguments = ["router", *QUICK, "--outdir", str(tmp_path), "--run", "one", "--device", "cpu"]
    assert runner.main([*arguments, "--shapes", "tiny", "--block-geometries", "tiny"]) == 0
    told = capsys.readouterr()
    rows = list(read_rows([tmp_path / "router-one.jsonl"]))
    mine = {row.method: row for row in rows if row.level == "router"}
    # No row of the list is missing: what cannot be had says why.
    assert list(mine) == list(ROWS)
    absent = {name for name, row in mine.items() if row.gate.startswith("unavailable: ")}
    assert {"sage", "flash", "flex", "flex-sparse30", "fp16pv-accum"} <= absent
    assert all(len(mine[name].gate) > len("unavailable: ") for name in absent)
    assert "flex rows need CUDA" in told.out and "unavailable: " in told.err
    for name in mine.keys() - absent:
        row = mine[name]
        assert row.gate == "pass" and row.ms > 0 and row.error["relative_l2"] > 0, name
        assert (row.tokens, row.heads, row.gpu) == (604, 2, "cpu")
    assert mine["int8"].implementation == "eager" and mine["int8"].precision == "int8"
    densities = [mine[f"int8-sparse{n}"].density for n in (100, 50, 30, 15)]
    assert densities[0] == 1.0 and densities == sorted(densities, reverse=True)
    assert mine["int8-sparse100"].error == mine["int8"].error
    assert {row.method for row in rows if row.level == "router-prepare"} >= {"int8", "full"}
    assert all(row.passed for row in rows if row.level == "router-checks")
    blocks = {row.method: row for row in rows if row.level == "router-block"}
    assert blocks["int8-mm-atten"].ms > 0 and blocks["bf16-sage"].gate.startswith("unavailable: ")
    document = json.loads((tmp_path / "router-one.json").read_text())
    int8 = document["shapes"]["tiny"]["int8"]
    assert int8["ms"] > 0 and int8["prep_ms"] > 0 and int8["ms_sigma"] >= document["drift"]
    assert document["shapes"]["tiny"]["sage"]["error"].startswith("unavailable: ")
    assert document["blocks"]["tiny"]["bf16-atten"]["x4"] > 0
    assert document["settings_advice"]["shape"] == "tiny"
    assert "Settings advice, judged on tiny" in told.out
    assert (tmp_path / "router-one.txt").read_text().startswith("tiny 1x2x604x64")


def test_the_plot_has_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"tiny": {"base": Figure(1.0, 0.01, 0.002), "int8": Figure(0.5, 0.01, 0.02)}}
    from solspark.bench.router_plots import plot_router

    path = tmp_path / "plot.png"
    assert plot_router(figures, "title", path) == [path] and path.stat().st_size > 5000
    assert plot_router({"tiny": {}}, "title", tmp_path / "none.png") == []


def test_a_failing_row_of_ours_fails_the_run_and_is_not_timed(tmp_path, monkeypatch, capsys):
    build = router_session.build_row

    def broken(row, inputs, platform):
        built = build(row, inputs, platform)
        whole = built.run
        built.run = lambda: (whole()[0] * 1.3, None)
        return built

    monkeypatch.setattr(router_session, "build_row", broken)
    options = [*QUICK, "--skip-checks", "--sections", "attention", "--save", "none"]
    options += ["--configs", "noquant,int8", "--json", str(tmp_path / "rows.json")]
    assert router_bench.main(["--shapes", "tiny", "--device", "cpu", *options]) == 1
    rows = list(read_rows([tmp_path / "rows.jsonl"]))
    assert [row.ms for row in rows] == [None, None]
    assert "max error" in rows[0].gate and "relative L2" in rows[1].gate
    assert "GATE" in capsys.readouterr().err


def test_a_row_that_raises_fails_with_its_words(tmp_path, monkeypatch, capsys):
    def raising(row, inputs, platform):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(router_session, "build_row", raising)
    options = [*QUICK, "--skip-checks", "--sections", "attention", "--save", "none"]
    options += ["--configs", "int8", "--json", str(tmp_path / "rows.json")]
    assert router_bench.main(["--shapes", "tiny", "--device", "cpu", *options]) == 1
    (row,) = read_rows([tmp_path / "rows.jsonl"])
    assert row.gate == "RuntimeError: no such kernel" and row.ms is None


def test_a_lost_device_stops_the_run_and_keeps_what_there_is(tmp_path, monkeypatch, capsys):
    def lost(row, inputs, platform):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(router_session, "build_row", lost)
    options = [*QUICK, "--skip-checks", "--save", "none", "--json", str(tmp_path / "rows.json")]
    options += ["--configs", "base,int8", "--shapes", "tiny,tiny-masked", "--device", "cpu"]
    assert router_bench.main(options) == 1
    rows = list(read_rows([tmp_path / "rows.jsonl"]))
    # Every row that was asked for is told of, also those of later shapes and blocks.
    attention = [row for row in rows if row.level == "router"]
    assert [row.problem for row in attention] == ["tiny"] * 2 + ["tiny-masked"] * 2
    assert all("the device context is lost" in row.gate for row in rows[1:])
    assert {row.method for row in rows if row.level == "router-block"} == set(BLOCK_ROWS)


def test_a_failing_check_fails_the_run(monkeypatch, capsys):
    def wrong(inputs, options):
        return torch.zeros_like(inputs.query)

    monkeypatch.setattr("solspark.bench.router_checks._run", wrong)
    options = ["--skip-bench", "--json", "none", "--save", "none", "--device", "cpu"]
    assert router_bench.main(options) == 1
    assert "check plain" in capsys.readouterr().err


def test_unknown_ids_are_refused_with_the_valid_ones(capsys):
    for option in ("--configs", "--block-configs", "--shapes", "--sections", "--block-geometries"):
        assert router_bench.main([option, "nothing"]) == 1
        told = capsys.readouterr().err
        assert option in told and "'nothing' is unknown; valid are" in told and "all" in told
    assert router_bench.main(["--list"]) == 0
    assert "flex-radial30" in capsys.readouterr().out


def test_ids_are_chosen_in_order_once_and_aliases_spelled_out():
    chosen = choose_ids("sparse,h3,sdxl", PRESETS, "--shapes", ALIASES)
    assert chosen == ["krea2", "h3", "h3-long", "sdxl"]
    assert len(choose_ids("gate", PRESETS, "--shapes", ALIASES)) == 6
    assert choose_ids("all", ROWS, "--configs", {}) == list(ROWS)


# Presets and gates


def test_presets_have_the_published_shapes():
    sizes = {name: PRESETS[name].size for name in ("sd15", "sdxl-cross", "qwen3-te", "h3")}
    assert sizes == {
        "sd15": "2x8x4096x40",
        "sdxl-cross": "2x10x4096x77x64",
        "qwen3-te": "2x16/8x512x128",
        "h3": "1x56x38222x128",
    }
    assert PRESETS["h3"].iters == 8 and PRESETS["h3-long"].iters == 6
    assert PRESETS["h3-long"].least_gib > PRESETS["h3"].least_gib > 4


def test_masks_hide_what_they_say_and_large_ones_are_refused():
    mask = make_mask(replace(PRESETS["krea2"], tokens=600), CPU)
    assert mask.shape == (1, 1, 600, 600)
    live = torch.ones(600, dtype=torch.bool)
    live[128:512] = False
    assert torch.equal(mask[0, 0], live[:, None] & live)
    padding = make_mask(PRESETS["tiny-masked"], CPU)
    assert padding.shape == (1, 1, 1, 604) and int((~padding).sum()) == 151
    with pytest.raises(ValueError, match="2\\^31"):
        make_mask(Preset("large", 1, 1, 50_000, 64, mask="segment"), CPU)


def test_keys_share_a_bias_and_have_three_wide_channels():
    key = inputs_of(dtype=torch.float32).key
    assert 2 < float(key.mean(2).pow(2).mean().sqrt()) < 4
    assert int((key.std(2)[0, 0] > 2.5).sum()) == 3
    again = inputs_of(dtype=torch.float32).key
    assert torch.equal(key, again)


def test_the_gate_knows_the_selection_of_a_sparse_row():
    inputs = inputs_of()
    for name in ("int8-sparse30", "block-sparse30", "block-radial30"):
        row = ROWS[name]
        out, selection = build_row(row, inputs, HERE).run()
        most = 0.2 if row.quantized else None
        assert judge_rows(inputs, out, selection, most=most, dead=True).passed, name
        # The same output judged against other tiles, or as if it were dense, fails.
        other = replace(selection, keep=selection.keep.flip(-1))
        assert not judge_rows(inputs, out, other, most=most, dead=True).passed, name
        assert not judge_rows(inputs, out, None, most=most, dead=True).passed, name


def test_dead_rows_are_zero_for_us_and_do_not_count_for_others():
    preset = replace(PRESETS["krea2"], heads=1, tokens=600, head_dim=64)
    inputs = make_router_inputs(preset, CPU, torch.bfloat16)
    out, _ = build_row(ROWS["noquant"], inputs, HERE).run()
    assert judge_rows(inputs, out, None, most=None, dead=True).passed
    assert math.isfinite(inputs.error(out)) and inputs.error(out) < 0.01
    out[:, :, 128:512] = float("nan")
    assert judge_rows(inputs, out, None, most=None, dead=True).gate == "not finite"
    assert judge_rows(inputs, out, None, most=None, dead=False).passed
    assert inputs.error(out) < 0.01
    out[:, :, 0] = float("nan")
    assert judge_rows(inputs, out, None, most=None, dead=False).gate == "not finite"


@pytest.mark.parametrize("name", ["tiny-causal", "tiny-masked"])
def test_rows_pass_on_causal_grouped_and_masked_calls(name):
    inputs = inputs_of(name)
    for label in ("base", "noquant", "smooth", "int8-sparse50", "block-sparse50"):
        reasons = obstacles(ROWS[label], inputs, HERE)
        if name == "tiny-causal" and ROWS[label].budget is not None:
            assert "a selection takes no causality" in reasons
            continue
        assert reasons == []
        out, selection = build_row(ROWS[label], inputs, HERE).run()
        most = 0.2 if ROWS[label].quantized else None
        assert judge_rows(inputs, out, selection, most=most, dead=True).passed, label


def test_reasons_on_other_machines():
    inputs = inputs_of()
    cuda = Platform("cuda", None, (9, 0))
    assert "the kernel that sage itself takes elsewhere" in str(
        obstacles(ROWS["sagefp16"], inputs, cuda)
    )
    assert "only on rocm" in str(obstacles(ROWS["amdflash"], inputs, cuda))
    assert obstacles(ROWS["int8"], inputs, HERE) == []
    cross = make_router_inputs(replace(PRESETS["tiny"], key_tokens=77), CPU, torch.bfloat16)
    assert "cross attention" in str(obstacles(ROWS["int8-sparse30"], cross, HERE))
    assert obstacles(ROWS["int8"], cross, HERE) == []
    assert "cannot take a" in str(obstacles(ROWS["block-sparse30"], _dense_mask(inputs), HERE))
    assert obstacles(ROWS["int8-sparse30"], _dense_mask(inputs), HERE) == []


def _dense_mask(inputs):
    tokens = inputs.preset.tokens
    return replace(inputs, mask=torch.ones(1, 1, tokens, tokens, dtype=torch.bool))


def test_the_correctness_list_covers_the_specification():
    names = {item.name for item in router_checks(CPU, torch.float16)}
    assert names == {
        "plain", "causal", "grouped heads", "bool padding", "float mask", "rotated",
        "head dim 40", "1,000 tokens", "cross", "inputs x 100", "keys x 1,000",
    }  # fmt: skip


# Blocks


@pytest.mark.parametrize("gated", [False, True])
def test_a_block_of_every_product_is_near_its_reference(gated):
    geometry = replace(GEOMETRIES["tiny"], tokens=200, gated=gated)
    weights = make_weights(geometry, CPU, torch.float32)
    x = torch.randn(1, 200, geometry.width)
    first, last = reference_block(x, weights, geometry)
    assert first.shape == last.shape == x.shape and not torch.allclose(first, last)
    errors = {}
    for kind in ("plain", "int8", "int8-mm"):
        out = block_forward(
            x,
            weights.linear(kind),
            weights,
            geometry,
            torch.nn.functional.scaled_dot_product_attention,
        )
        errors[kind] = block_errors(out, first)[0]
    assert errors["plain"] < 1e-6 < errors["int8"] < errors["int8-mm"] < 0.05


def test_linear_kinds_are_checked():
    with pytest.raises(ValueError, match="int8-mm"):
        make_linear(torch.ones(4, 4), "int4")


# Timing


def test_sigma_of_a_median_shrinks_with_the_number_of_calls():
    few = Sample(10.0, 1.349, 4)
    assert few.sigma == pytest.approx(1.2533 / 2 / 10)
    assert replace(few, count=16).sigma == pytest.approx(few.sigma / 2)
    assert sample_of([1.0, 2.0, 3.0]).ms == 2.0 and sample_of([5.0]).sigma == 0.0


def test_repeats_fill_the_time_within_their_bounds():
    assert repeats(0.01, 12, 0.5) == 50
    assert repeats(1.0, 12, 0.5) == 12
    assert repeats(1e-6, 12, 0.5) == 500


def test_drift_is_a_root_mean_square_within_its_clamp():
    assert drift_of([]) == drift_of([1.0]) == 0.005
    assert drift_of([math.exp(0.03), math.exp(-0.04)]) == pytest.approx(math.sqrt(12.5e-4))
    assert drift_of([2.0]) == 0.10


def test_a_row_may_not_take_longer_than_its_deadline():
    with pytest.raises(TimeoutError, match=r"slow took more than 0\.05 s"):
        with deadline(0.05, "slow"):
            time.sleep(2)
    with deadline(5, "quick"):
        pass


# Advice


def table(**rows):
    return {name: Figure(ms, 0.005, error) for name, (ms, error) in rows.items()}


BASE = dict(noquant=(10.0, 0.003), int8=(5.0, 0.03), smooth=(5.2, 0.018), fp8qk=(4.9, 0.09))


def test_z_is_adjusted_for_the_pool():
    assert [z_of(n) for n in (1, 2, 3, 4)] == pytest.approx([1.28, 1.63, 1.82, 1.95], abs=0.01)


def test_verdicts_take_noise_into_account():
    old = Figure(10.0, 0.01, 0.003)
    assert verdict(old, Figure(5.0, 0.01, 0.03), 1) == FASTER
    assert verdict(old, Figure(9.5, 0.01, 0.03), 1) == NOT_FASTER
    assert verdict(old, Figure(8.9, 0.01, 0.03), 1) == INCONCLUSIVE
    assert verdict(replace(old, sigma=0.02), Figure(8.8, 0.001, 0.03), 1) == INCONCLUSIVE
    assert verdict(replace(old, sigma=0.001), Figure(8.8, 0.001, 0.03), 1) == FASTER


def test_the_most_accurate_of_the_fast_rows_is_picked():
    figures = table(**BASE)
    # fp8qk is fastest, and too inaccurate to choose; smooth is within 5 % of int8.
    assert pick(figures) == ("smooth", 2)
    assert pick(table(**{**BASE, "smooth": (5.3, 0.018)})) == ("int8", 1)
    assert starred(table(noquant=(5.0, 0.003), int8=(5.1, 0.03))) == "noquant"


def test_sparse_external_and_unsafe_rows_are_never_candidates():
    names = {name: (1.0, 0.0001) for name in ROWS}
    found = candidates(table(**names))
    assert "int8" in found and "full" in found
    assert not {"noquant", "base", "flex", "int8-sparse15", "pvaccum", "block-radial30"} & set(
        found
    )
    assert starred(table(**{"int8": (5.0, 0.03), "int8-sparse15": (1.0, 0.01)})) == "int8"


def settings(advice):
    return {item.name: item.value for item in advice.settings}


def test_a_faster_configuration_is_recommended_with_reasons():
    advice = advise({"flux2": table(**BASE), "sdxl": table(**BASE)})
    assert (advice.shape, advice.picked, advice.verdict) == ("flux2", "smooth", FASTER)
    assert settings(advice) == {
        "quantized_matmul": "int8",
        "quantized_pv": "none",
        "fp16 accumulation": False,
        "quantized_smooth_k": True,
        "quantized_hadamard": 0,
        "quantized_granularity": "row",
        "group size": 256,
    }
    tiles = advise({"flux2": table(**BASE, int8tile=(5.0, 0.010))})
    assert tiles.picked == "int8tile" and settings(tiles)["quantized_granularity"] == "tile"
    assert all(item.reason for item in advice.settings)
    assert any("fp8qk" in note for note in advice.notes)
    # The block table, where measured, decides what an addition is worth.
    block = table(int8=(20.0, 0.0110), smooth=(20.1, 0.0108))
    assert settings(advise({"flux2": table(**BASE)}, block))["quantized_smooth_k"] is False


def test_no_change_is_recommended_without_a_gain():
    close = {**BASE, "noquant": (5.75, 0.003)}
    advice = advise({"flux2": table(**close)})
    assert advice.verdict == INCONCLUSIVE and settings(advice)["quantized_matmul"] is None
    slow = {**BASE, "noquant": (4.0, 0.003)}
    advice = advise({"flux2": table(**slow)})
    assert advice.verdict == NOT_FASTER and settings(advice)["quantized_matmul"] == "none"
    assert advise({"flux2": table(int8=(5.0, 0.03))}) is None


def test_disagreeing_shapes_and_implausible_errors_are_told():
    slow = {**BASE, "noquant": (4.0, 0.003)}
    advice = advise({"flux2": table(**BASE), "sdxl": table(**slow), "anima": table(**BASE)})
    assert any("disagree" in note for note in advice.notes)
    # anima's smooth 0.018 lies in its band, sdxl's 0.018 just below its own.
    told = [note for note in advice.notes if "outside" in note]
    assert told == ["sdxl smooth: error 0.0180 outside 0.0185-0.025"]
    half = advise({"flux2": table(**BASE), "sdxl": table(**slow)}, dtype="fp16")
    assert not any("outside" in note for note in half.notes)
