"""Figures: what is drawn is what was measured, infinite values included, and nothing global is touched."""

import math

import numpy as np
import pytest
import torch

from tests.report.synthetic import row
from wellcond.monitor import Row
from wellcond.report import DARK, LIGHT, bars_figure, layers_figure, spectrum_figure
from wellcond.report.folder import MeasuredRow
from wellcond.report.kappas import panels
from wellcond.report.style import legend, marks, png
from wellcond.report.style import panel as empty_panel


def measured(arm, seed, step, site, layer, head, kappa, pinv=None):
    fields = row(arm, seed, step, site, layer, head, kappa, pinv)
    return MeasuredRow(fields.pop("arm"), fields.pop("seed"), Row(**fields))


def test_quantities_are_means_over_heads_layers_and_seeds():
    rows = [
        measured(
            "a", seed, step, "attention.output", layer, head, 1 + seed + 10 * step + 100 * layer + 1000 * head
        )
        for seed in (0, 1)
        for step in (0, 5)
        for layer in (0, 1)
        for head in (0, 1)
    ]
    first, every = panels(rows, ["a"])
    assert (first.quantity, every.quantity, first.symbol) == ("first_layer", "all_layers", "κ")
    assert first.values["a"].tolist() == [[501, 551], [502, 552]]
    assert every.values["a"].tolist() == [[551, 601], [552, 602]]
    assert every.averages()["a"].tolist() == [576, 577]


def test_softmax_matrices_and_conditioned_sites_are_not_averaged_in():
    rows = [
        measured("a", 0, 0, "tokens", None, None, 5.0),
        measured("a", 0, 0, "conditioned.before", None, None, 1e6),
        measured("a", 0, 0, "attention.output", 0, 0, 7.0),
        measured("a", 0, 0, "attention.weights", 0, 0, 1e6),
    ]
    assert [panel.values["a"].item() for panel in panels(rows, ["a"])] == [5.0, 7.0, 7.0]


def test_one_infinite_kappa_turns_the_whole_panel_to_kappa_pinv():
    rows = [
        measured("a", 0, 0, "tokens", None, None, math.inf, 30.0),
        measured("a", 0, 5, "tokens", None, None, 40.0, 40.0),
        measured("b", 0, 0, "tokens", None, None, 2.0, 1.5),
    ]
    (panel,) = panels(rows, ["a", "b"])
    assert (panel.symbol, panel.infinite) == ("κ⁺", ("a",))
    assert panel.values["a"].tolist() == [[30.0, 40.0]]
    assert panel.values["b"].tolist() == [[1.5]]


def test_steps_that_a_seed_lacks_are_counted_and_no_common_step_is_an_error():
    rows = [measured("a", seed, step, "tokens", None, None, 3.0) for seed, step in ((0, 0), (0, 5), (1, 0))]
    (panel,) = panels(rows, ["a"])
    assert panel.steps["a"].tolist() == [0]
    assert panel.left_out == 1
    with pytest.raises(ValueError, match=r"seeds \[0, 1\] of arm 'a' have no measured step in common"):
        panels(rows[1:], ["a"])


def test_bars_start_at_one_and_end_at_the_mean():
    rows = [measured(arm, 0, 0, "tokens", None, None, kappa) for arm, kappa in (("a", 87.0), ("b", 1.9))]
    axes = bars_figure(panels(rows, ["a", "b"])[0], marks(["a", "b"], "a")).axes[0]
    ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    assert ends == [(1, pytest.approx(87.0)), (1, pytest.approx(1.9))]
    assert [text.get_text() for text in axes.texts] == ["87", "1.9"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a", "b"]


def test_bar_of_a_measurement_that_is_nan_is_not_drawn_but_said():
    rows = [
        measured("a", 0, 0, "tokens", None, None, math.nan),
        measured("b", 0, 0, "tokens", None, None, 2.0),
    ]
    axes = bars_figure(panels(rows, ["a", "b"])[0], marks(["a", "b"], "a")).axes[0]
    assert [text.get_text() for text in axes.texts] == ["not finite", "2"]
    assert len(axes.patches) == 1


def test_spectrum_takes_tensors_in_any_order_and_reports_zeros():
    figure = spectrum_figure(
        torch.tensor([1.0, 0.0, 10.0]), torch.tensor([11.0, 10.0, 20.0], requires_grad=True)
    )
    before, after = figure.axes[0].lines
    assert before.get_ydata()[:2].tolist() == [10.0, 1.0]
    assert np.isnan(before.get_ydata()[2])
    assert after.get_ydata().tolist() == [20.0, 11.0, 10.0]
    assert before.get_label() == "before, σ₁/σₙ = ∞"
    assert figure.axes[0].texts[0].get_text() == "1 of 3 before are 0"
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("values", [[], [[1.0]], [1.0, math.nan], [1.0, -1.0]])
def test_spectrum_refuses_what_is_none(values):
    with pytest.raises(ValueError, match="singular values before"):
        spectrum_figure(values)


def layer_rows(infinite=False):
    attention = [
        Row(3, "attention.output", layer, head, 10.0 + layer + 4 * head, 9.0, 8, 1.0, 0.1, f"b.{layer}", 2)
        for layer in range(3)
        for head in range(2)
    ]
    kappa = math.inf if infinite else 90.0
    return [Row(3, "tokens", None, None, kappa, 88.0, 16, 9.0, 0.1, "b.0", 2), *attention]


def test_layers_show_the_mean_over_heads():
    line, tokens = layers_figure(layer_rows()).axes[0].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [12.0, 13.0, 14.0])
    assert tokens.get_label() == "κ of the tokens: 90"


def test_layers_of_rank_deficient_tokens_show_kappa_pinv_and_say_so():
    figure = layers_figure(layer_rows(infinite=True))
    assert figure.axes[0].lines[1].get_label() == "κ⁺ of the tokens: 88"
    assert png(figure).startswith(b"\x89PNG")


def test_layers_show_both_sides_of_a_correction():
    rows = [
        *layer_rows(),
        Row(3, "conditioned.before", None, None, 90.0, 90.0, 16, 9.0, 0.1, "b.0", 2),
        Row(3, "conditioned.after", None, None, 1.97, 1.97, 16, 9.0, 0.1, "b.0", 2),
    ]
    labels = [line.get_label() for line in layers_figure(rows).axes[0].lines]
    assert labels[1:] == ["κ of the tokens before: 90", "κ of the tokens after: 1.97"]


def test_layers_refuse_nothing_and_several_steps():
    with pytest.raises(ValueError, match="no rows to draw"):
        layers_figure([])
    with pytest.raises(ValueError, match=r"one step are expected, not of steps \[3, 4\]"):
        layers_figure([*layer_rows(), Row(4, "tokens", None, None, 2.0, 2.0, 4, 1.0, 0.5, "b.0", 1)])


@pytest.mark.parametrize(
    "arms", [("baseline", "conditioned", "conditioned-paper"), ("baseline", "conditioned", "rescaled")]
)
def test_the_legend_is_inside_the_figure(arms):
    figure, axes = empty_panel("κ", LIGHT)
    for arm in arms:
        axes.plot([0, 1], [0, 1], "o:", label=arm)
    legend(figure, axes, LIGHT)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def test_an_arm_keeps_its_mark_and_arms_differ():
    arms = ["baseline", *(f"arm {i}" for i in range(12))]
    look = marks(arms, "baseline")
    assert len({(m.colour, m.marker, m.dashes) for m in look.values()}) == len(arms)
    assert marks(arms[:3], "baseline")["arm 1"] == look["arm 1"]
    assert marks(arms, "baseline", DARK)["arm 1"].marker == look["arm 1"].marker


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_stand_out_from_the_paper(theme):
    """WCAG asks 3:1 of graphics and 4.5:1 of text."""
    assert contrast(theme.ink, theme.paper) >= 7
    assert contrast(theme.faint, theme.paper) >= 4.5
    assert all(contrast(colour, theme.paper) >= 3 for colour in theme.colours)


def contrast(one, other):
    def luminance(colour):
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_no_global_state_of_matplotlib_is_touched():
    import subprocess
    import sys

    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy();"
        "from wellcond.report import spectrum_figure; from wellcond.report.style import png;"
        "png(spectrum_figure([2.0, 1.0]));"
        "assert 'matplotlib.pyplot' not in sys.modules; assert matplotlib.rcParams.copy() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
