"""The picture a demo ends with: what was learnt, how stale, how far apart, how small."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rollwire.ops.demo.tally import Tally, accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT, _ACCENT, _SECOND = "#1b1f24", "#8c959f", "#0969da", "#bf3989"


def draw_curves(tally: Tally, environment: str, path: Path, title: str) -> None:
    """Writes a PNG of four panels over the policy version."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [step for _, step in sorted(tally.steps.items()) if step.groups]  # a revert measured nothing
    versions = [s.version for s in steps]
    figure, panels = plt.subplots(2, 2, figsize=(12, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=13, color=_INK)
    learnt, stale, apart, small = panels.flat

    _titled(learnt, "Held-out accuracy and training reward", "share")
    learnt.plot(
        versions,
        _smooth([s.reward_mean for s in steps]),
        color=_SOFT,
        lw=1.2,
        label="reward in the plan (mean of 10)",
    )
    for suffix, color, label in (
        ("heldout", _ACCENT, "held out, as drawn"),
        ("distinct", _SECOND, "held out, distinct tasks"),
    ):
        full = sorted((v, e) for (suite, v), e in tally.full.items() if suite == f"{environment}.{suffix}")
        quick = sorted(
            (v, e) for (suite, v), e in tally.full.items() if suite == f"{environment}.{suffix}.quick"
        )
        merged = dict([(v, accuracy(e)) for v, e in quick] + [(v, accuracy(e)) for v, e in full])
        if merged:
            learnt.plot(
                sorted(merged),
                [merged[v] for v in sorted(merged)],
                "o-",
                ms=3.5,
                color=color,
                lw=1.4,
                label=label,
            )
    learnt.set_ylim(0, None)
    learnt.legend(frameon=False, fontsize=9)

    _titled(stale, "Lag of what was trained on", "versions")
    stale.plot(versions, [s.max_lag for s in steps], color=_SECOND, lw=0.9, label="oldest token of the step")
    means = [sum(c.lag * c.tokens for c in s.lag_histogram) / max(1, s.trained_tokens) for s in steps]
    stale.plot(versions, means, color=_ACCENT, lw=1.2, label="mean over tokens")
    stale.set_ylim(0, None)
    stale.legend(frameon=False, fontsize=9)

    _titled(apart, "Mismatch between trainer and sampler, p99 of |log π − log μ|", "nats")
    apart.semilogy(
        versions, [max(s.mismatch.p99, 1e-9) for s in steps], color=_SECOND, lw=1, label="all tokens"
    )
    same = [(s.version, max(s.mismatch_same_version.p99, 1e-9)) for s in steps if s.mismatch_same_version]
    if same:
        apart.semilogy(
            [v for v, _ in same],
            [p for _, p in same],
            color=_ACCENT,
            lw=1,
            label="tokens of the same version",
        )
    apart.legend(frameon=False, fontsize=9)

    _titled(small, "Delta against the full state", "%")
    deltas = [tally.versions[v] for v in sorted(tally.versions) if tally.versions[v].kind == "delta"]
    small.plot(
        [d.version for d in deltas],
        [100 * d.stored_bytes / d.full_bytes for d in deltas],
        color=_ACCENT,
        lw=1.2,
    )
    small.set_ylim(0, None)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _titled(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=_INK)
    axes.set_xlabel("version", fontsize=9, color=_SOFT)
    axes.set_ylabel(unit, fontsize=9, color=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#d0d7de", lw=0.5)


def _smooth(values: list[float], window: int = 10) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]
