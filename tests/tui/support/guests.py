"""An agent's view of a run that says little of itself: a guest's."""

import msgspec
from tests.tui.support.recorded import Message, Recorded, run_view, under_way

from trainctl.protocol import messages as m

OFFERS = (("pause", ""), ("set-lr", "its optimizer has no hooks"))


def view_of(view: m.RunView) -> m.RunView:
    ranks = tuple(msgspec.structs.replace(rank, share=None, micro_batch=None) for rank in view.ranks)
    return msgspec.structs.replace(
        view, kind="guest", verbs=OFFERS, ranks=ranks, steps=None, global_batch=None, samples=None, cursor=None,
        learning_rate=None, eval_loss=None, eval_step=None,
    )  # fmt: skip


def step_of(step: m.StepCommitted) -> m.StepCommitted:
    return msgspec.structs.replace(
        step, loss=None, weight=None, learning_rate=None, grad_norm=None, cursor=None, global_batch=None
    )


def part_of(part: m.RankStep) -> m.RankStep:
    return msgspec.structs.replace(part, micro_batch=None, phases=m.Phases())


def of_guest(message: Message) -> Message:
    """The message as a guest's, without what it does not say."""
    match message:
        case m.RunView():
            return view_of(message)
        case m.StepCommitted():
            return step_of(message)
        case m.RankStep():
            return part_of(message)
        case m.Snapshot(run=m.RunView() as run, last_step=m.StepCommitted() as last):
            parts = tuple(part_of(part) for part in message.rank_steps)
            series = tuple(one for one in message.series if one.metric == "step_seconds")
            return msgspec.structs.replace(
                message, run=view_of(run), last_step=step_of(last), rank_steps=parts, series=series
            )
        case _:
            return message


class GuestSource(Recorded):
    """An agent with a guest of three ranks, whose record has no metric that is asked for."""

    def __init__(self) -> None:
        super().__init__([of_guest(message) for message in under_way(run_view(3))])

    async def history(self, asked: m.HistoryRequest) -> m.History:
        return m.History(rid="r", series=())
