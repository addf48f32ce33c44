"""When plants strike: each decorator names the moment at which a training calls a method of ``planted.Plant``."""

LONG = 1000.0
"""Seconds that no play waits for."""
ONCE, FROM_THEN_ON, EVERY_STEP, IN_ROW, IN_MODEL, IN_LOSS = (set() for _ in range(6))
"""Names of plants by moment."""


def once(method):
    """Strikes once, after the step ``at``, on the ranks of the play."""
    ONCE.add(method.__name__)
    return method


def from_then_on(method):
    """Strikes after each step from ``at`` on, on the ranks of the play."""
    FROM_THEN_ON.add(method.__name__)
    return method


def every_step(method):
    """What every rank does after each step."""
    EVERY_STEP.add(method.__name__)
    return method


def in_row(method):
    """Changes a row that was read."""
    IN_ROW.add(method.__name__)
    return method


def in_model(method):
    """Work in a forward pass of training."""
    IN_MODEL.add(method.__name__)
    return method


def in_loss(method):
    """Changes the loss of the step ``at``, on the ranks of the play."""
    IN_LOSS.add(method.__name__)
    return method
