"""A live change of detail from within the program, and what is in force."""

from __future__ import annotations

from dataclasses import replace

from ..runs.detail_request import Change, changed
from .session import Session


class TuneMethods:
    """More detail for a while, in the middle of a run; the command ``gradmon detail`` does the same from outside."""

    _session: Session

    def set_detail(
        self,
        *,
        every: int | None = None,
        preset: str | None = None,
        steps: int | None = None,
        from_step: int | None = None,
        reset: bool = False,
    ) -> None:
        """Measure more, or less, from the next step on, for ``steps`` steps of training; then all is again as the script asked for.

        May be called between two steps, from another thread, or in a signal handler: nothing happens here but that it is noted. It
        takes the place of a change before it, and training does not see it: parameters end as the same bits. What ``on_spike=`` does
        it does in the steps that are monitored, of which there are others now.

        Args:
            every: monitor the steps that are divisible by it. For that time neither ``every`` nor ``monitor_step_fn`` nor
                ``overhead_budget`` of the script has a say, though ``monitor_step_fn`` is asked as ever, and the budget goes on from where
                it was. None leaves all three in charge.
            preset: ``"cheap"``, ``"standard"`` or ``"full"``, in the place of the script's; None for that one. What was added by
                ``add_*`` stays, and so do the detectors. In a model that is compiled, metrics of modules and of attention stay those
                of the script, for hooks that come after its first call are not called, or have it compiled again.
            steps: for so many; None until further notice.
            from_step: not before the step of that number.
            reset: back to what the script asked for.

        With several ranks it is the call on the first one that counts. Where ranks exchange anything (tensors that are spread,
        activations, values logged with ``reduce=``), all of them change together: the first rank tells the others in the exchange
        of the next step that is monitored by the cadence in force, which may be far away, and the step after that is the first. Where they
        exchange nothing, as under DDP with ``"cheap"`` and ``"standard"``, this rank changes alone; what it then measures of
        activations is of its own batches, and detectors do not judge the steps that only it monitors.

        Nothing of it is part of :meth:`state_dict`: a run that is resumed does what its script asks for.

        Raises:
            ValueError: nothing is to be changed, or an argument is not what it should be.
        """
        change = changed(every, preset, steps, from_step)
        if reset and change != Change():
            raise ValueError("reset=True goes back to what the script asked for, and takes no other argument")
        if change.is_reset and not reset:
            raise ValueError(
                "nothing is to be changed; give every= or preset=, or reset=True to go back to what the script asked for"
            )
        if not self._session.guard.inert:
            self._session.tuning.ask(change)

    @property
    def detail(self) -> Change | None:
        """The live change under which the step in flight is measured, or the next one: its ``every``, ``preset``, and in ``steps`` for how
        many more steps; None where all is as the script asked for.
        """
        tuning = self._session.tuning
        return None if tuning.in_force is None else replace(tuning.in_force, steps=tuning.left)
