"""The tables of ``compression.py`` that a person reads."""

import itertools

import limits


def as_text(report, table):
    """The report in words: the machine, the sub-command's table, the goals."""
    host = report["machine"]
    lines = [
        f"{host['cpu']}, {host['cores']} cores; {report['threads_per_process']} thread(s) for each "
        f"process; load average before: {host['load_average']}",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
        *table(report),
    ]
    lines += [f"left out: {what}: {why}" for what, why in report.get("skipped", {}).items()]
    return "\n".join(lines)


def step_table(report):
    """Rows and goals for each model, cluster and link."""
    lines = []
    for place, rows in itertools.groupby(report["results"], key=_place):
        megabytes, workers, rate, delay = place
        rows = list(rows)
        lines += [
            "",
            f"{megabytes} MB of gradients, {workers} workers, {rate}, delay {delay} "
            f"({rows[0]['network']}); {report['rounds']} round(s) of {report['steps']} steps",
            f"{'':17}{'step, ms':>9}{'fastest':>9}{'CPU':>8}{'wire, kB':>10}{'formula':>10}"
            f"{'ratio':>7}{'alone':>8}{'encode':>8}{'limit':>9}{'step/limit':>11}",
        ]
        lines += [_step_line(row) for row in rows]
        goals = [goal for goal in report["goals"] if _place(goal) == place]
        lines += map(limits.goal_line, goals)
    missing = report["missing"].items()
    lines += [f"{name:17}missing: {', '.join(lacking)} not installed" for name, lacking in missing]
    return lines


def encode_table(report):
    """Speeds on one core."""
    columns = ("encode", "encode_plain", "decode")
    lines = [
        "",
        "MB/s of float32 on one core, 25.6 MB",
        f"{'':17}{'encode':>9}{'no e. f.':>9}{'decode':>9}{'payload, kB':>13}",
    ]
    for row in report["results"]:
        if "error" in row:
            lines.append(_failed(row))
            continue
        speeds = [row.get(f"{column}_mb_per_s") for column in columns]
        cells = "".join(f"{'-' if v is None else format(v, '.0f'):>9}" for v in speeds)
        lines.append(f"{row['contender']:17}{cells}{row['payload_bytes'] / 1e3:13.1f}")
    return lines + [limits.goal_line(goal) for goal in report["goals"]]


def small_table(report):
    """Times of both layouts."""
    lines = [
        "",
        "Two workers over loopback; an exchange and its update, ms",
        f"{'':17}{'200 x 1,000':>12}{'1 x 200,000':>12}{'ratio':>8}",
    ]
    for row in report["results"]:
        if "ratio" in row:
            many, one = row["many_ms"]["median"], row["one_ms"]["median"]
            lines.append(f"{row['contender']:17}{many:12.2f}{one:12.2f}{row['ratio']:8.2f}")
        if "error" in row:
            lines.append(_failed(row))
    return lines + [limits.goal_line(goal) for goal in report["goals"]]


def growth_table(report):
    """Measured and computed bytes by number of workers."""
    lines = [
        "",
        "kB that a worker sends in a step",
        f"{'':17}{'MB':>5}{'workers':>9}{'wire':>12}{'formula':>12}{'ratio':>8}",
    ]
    for row in sorted(report["results"], key=lambda row: (row["gradients"], row["contender"])):
        if "error" in row:
            lines.append(_failed(row))
            continue
        lines.append(
            f"{row['contender']:17}{row['gradients']:5}{row['workers']:9}"
            f"{row['wire_bytes'] / 1e3:12.1f}{row['formula_bytes'] / 1e3:12.1f}"
            f"{row['wire_ratio']:8.3f}"
        )
    return lines + [limits.goal_line(goal) for goal in report["goals"]]


def _place(row):
    return row["gradients"], row["workers"], row["rate"], row["delay"]


def _step_line(row):
    if "step_ms" not in row:
        return _failed(row)
    line = (
        f"{row['contender']:17}{row['step_ms']['median']:9.1f}{row['fastest_step_ms']:9.1f}"
        f"{row['cpu_ms']['median']:8.1f}{row['wire_bytes']['median'] / 1e3:10.1f}"
        f"{row['formula_bytes'] / 1e3:10.1f}{row['wire_ratio']:7.3f}"
    )
    if "limit_ms" in row:
        line += (
            f"{row['alone_ms']:8.1f}{row['encode_ms']:8.1f}{row['limit_ms']:9.1f}"
            f"{row['over_limit']:11.2f}"
        )
    return line + ("  (incomplete)" if "error" in row else "")


def _failed(row):
    return f"{row['contender']:17}failed: {row['error'].splitlines()[0]}"
