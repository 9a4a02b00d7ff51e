"""A simulation's figures drawn: TTFT, capacity, and what each replica had to do. Lazy matplotlib:
`pip install -e '.[bench]'`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.errors import CommandError
from tools.sim.settings import CLAIRVOYANT
from tools.sim.table import title

DPI = 120


def require_matplotlib() -> None:
    """Before anything is simulated. Raises CommandError."""
    if not can_draw():
        raise CommandError("plots need matplotlib: pip install -e '.[bench]'")


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def draw(result: dict[str, Any], file: Path) -> None:
    """TTFT distributions, the capacity curve, a heat map of the replicas: what was measured."""
    from matplotlib.figure import Figure

    policies = result["policies"]
    timed = {name: f for name, f in policies.items() if "ttft_percentiles_s" in f}
    sought = {name: f for name, f in policies.items() if "capacity_curve" in f}
    count = 2 * bool(timed) + bool(sought)
    figure = Figure(figsize=(6.5 * count, 5), layout="constrained")
    figure.suptitle(title(result["settings"]), fontsize="small")
    panels = list(figure.subplots(1, count, squeeze=False)[0])
    if timed:
        _distributions(panels[0], timed)
        _heat(figure, panels[-1], timed)
    if sought:
        _curves(panels[bool(timed)], sought, result["settings"]["capacity_slo_s"])
    figure.savefig(file, dpi=DPI)


def _style(name: str) -> dict[str, Any]:
    """Ours stands out; the bound is no competitor."""
    if name == CLAIRVOYANT:
        return {"label": f"({name})", "color": "black", "linestyle": ":"}
    return {"label": name, "linewidth": 2.5 if name == "warmroute" else 1.0}


def _distributions(axes: Any, policies: dict[str, Any]) -> None:
    shares = [percent / 100 for percent in range(101)]
    for name, figures in policies.items():
        axes.plot(figures["ttft_percentiles_s"], shares, **_style(name))
    axes.set(xscale="log", xlabel="TTFT, s", ylabel="share of the requests", title="TTFT")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _curves(axes: Any, policies: dict[str, Any], slo_s: float) -> None:
    """Dots where the objective held, crosses where it did not."""
    for name, figures in policies.items():
        curve = figures["capacity_curve"]
        held = [(load, time_s) for load, time_s in curve if time_s is not None]
        broke = [load for load, time_s in curve if time_s is None]
        loads, times = [load for load, _ in held], [time_s for _, time_s in held]
        (line,) = axes.plot(loads, times, marker=".", **_style(name))
        axes.plot(broke, [slo_s] * len(broke), "x", color=line.get_color())
    axes.axhline(slo_s, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="load", ylabel="TTFT p90, s", title="Capacity")
    axes.grid(alpha=0.3)


def _heat(figure: Any, axes: Any, policies: dict[str, Any]) -> None:
    replicas = list(next(iter(policies.values()))["replicas"])
    rows = [[f["replicas"][name]["busy_share"] for name in replicas] for f in policies.values()]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0)
    axes.set_yticks(range(len(policies)), list(policies))
    if len(replicas) <= 16:
        axes.set_xticks(range(len(replicas)), replicas)
    axes.set(title="share of the time that each replica was busy")
    figure.colorbar(image, ax=axes)
