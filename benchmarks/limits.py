"""What a step could take at best, and whether the goals are met: arithmetic on figures."""

ENCODE_GOALS = {"int8": 500, "one_bit": 1000, "top_k": 300, "power_sgd": 400}  # MB/s, at least
SMALL_GOAL = 3.0  # time of many small gradients over one large one's, at most
WIRE_GOAL = 0.05  # how far the wire may be from the formula
LIMIT_GOAL = 1.3  # step time over the limit, at most ...
LIMIT_GOAL_UP_TO = 100e6  # ... on links of up to so many bits per second
SPEED_UP_GOAL = 0.75  # achieved over possible speed-up, at least
SPEED_UP_OF = ("power_sgd", "top_k", "one_bit")
STOCK_GOALS = {25: 1.0, 100: 0.8}  # by megabytes: uncompressed step time over stock's, at most


def limit_seconds(compute, num_bytes, bits_per_second, encode):
    """The least time of a step: computing and sending overlap, encoding comes on top.

    Args:
        compute: seconds of a step without exchange.
        num_bytes: what a worker sends, by the formula.
        bits_per_second: the link's; 0 has no limit.
        encode: seconds.
    """
    sending = 8 * num_bytes / bits_per_second if bits_per_second else 0.0
    return max(compute, sending) + encode


def step_goals(rows, compressors):
    """The goals for one place (size, workers, link), given its rows.

    Args:
        rows: dict from a contender's name to its figures: ``step`` (median seconds), ``limit``
            and ``wire_ratio`` (or None), and the place: ``gradients``, ``rate``.
        compressors: names of the contenders that compress with tfdist.
    """
    goals = []
    if "none" in rows and "stock" in rows:
        bound = STOCK_GOALS[100 if rows["none"]["gradients"] >= 100 else 25]
        ratio = rows["none"]["step"] / rows["stock"]["step"]
        goals.append(at_most("uncompressed / stock", ratio, bound))
    for name, row in rows.items():
        ours = name == "none" or name in compressors
        if ours and row["wire_ratio"] is not None:
            goals.append(_wire_goal(f"{name}: wire / formula", row["wire_ratio"]))
        if name in compressors and row["limit"] and 0 < row["rate"] <= LIMIT_GOAL_UP_TO:
            goals.append(at_most(f"{name}: step / limit", row["step"] / row["limit"], LIMIT_GOAL))
        if name in SPEED_UP_OF and row["limit"] and "stock" in rows:
            achieved = rows["stock"]["step"] / row["step"]
            possible = rows["stock"]["step"] / row["limit"]
            label = f"{name}: speed-up {achieved:.2f} of {possible:.2f}"
            goals.append(_at_least(label, achieved / possible, SPEED_UP_GOAL))
    if "power_sgd" in rows and "torch_power_sgd" in rows:
        ratio = rows["power_sgd"]["step"] / rows["torch_power_sgd"]["step"]
        goals.append(_below("power_sgd / torch_power_sgd", ratio, 1.0))
    return goals


def encode_goals(speeds):
    """The goals for encoding; ``speeds`` in MB/s by name."""
    return [
        _at_least(f"{name}: encode, MB/s", speeds[name], bound)
        for name, bound in ENCODE_GOALS.items()
        if name in speeds
    ]


def small_goal(name, ratio):
    """The goal for many small gradients: their time over that of one large one."""
    return at_most(f"{name}: many small / one", ratio, SMALL_GOAL)


def growth_goal(name, workers, ratio):
    """The goal for the growth with the workers: bytes on the wire over the formula's."""
    return _wire_goal(f"{name}, {workers} workers: wire / formula", ratio)


def goal_line(goal):
    """A goal as a person reads it."""
    sign, bound = goal["sign"], goal["bound"]
    verdict = "met" if goal["met"] else "missed"
    return f"{goal['goal']:44}{goal['value']:10.2f}  goal {sign} {bound}: {verdict}"


def at_most(label, value, bound):
    """A goal that is met by a small value."""
    return _goal(label, value, "<=", bound, value <= bound)


def _at_least(label, value, bound):
    return _goal(label, value, ">=", bound, value >= bound)


def _below(label, value, bound):
    return _goal(label, value, "<", bound, value < bound)


def _wire_goal(label, ratio):
    return _goal(label, ratio, "within", f"1 +- {WIRE_GOAL}", abs(ratio - 1) <= WIRE_GOAL)


def _goal(label, value, sign, bound, met):
    return {"goal": label, "value": value, "sign": sign, "bound": bound, "met": met}
