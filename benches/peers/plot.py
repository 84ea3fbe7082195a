"""The picture: what is answered and how long it takes, against the load that comes."""

import matplotlib

matplotlib.use("svg")
# The same numbers make the same file.
matplotlib.rcParams["svg.hashsalt"] = "sconce"
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot, ticker  # noqa: E402


def draw(points, capacity, path):
    """Writes the plot of `measure.load_curve` as SVG."""
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    offered = [point["offered"] for point in points]
    upper.plot(offered, offered, color="lightgrey", linewidth=1)
    upper.plot(offered, [point["answered"] for point in points], marker="o", color="tab:blue")
    upper.set_ylabel("answered, texts/s")
    for name, color in (("p99", "tab:red"), ("p50", "tab:blue")):
        lower.plot(offered, [point[name] for point in points], marker="o", color=color, label=name)
    lower.set_yscale("log")
    lower.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    lower.yaxis.set_major_formatter("{x:g}")
    lower.yaxis.set_minor_formatter(ticker.NullFormatter())
    lower.set_ylabel("latency, ms")
    lower.set_xlabel("offered, texts/s")
    lower.legend()
    for axes in (upper, lower):
        axes.axvline(capacity, color="grey", linestyle="--", linewidth=1)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    upper.set_ylim(bottom=0)
    upper.annotate(
        "closed loop", (capacity, 0), xytext=(-4, 4), textcoords="offset points", ha="right", color="grey"
    )
    figure.savefig(path, format="svg", metadata={"Date": None})
