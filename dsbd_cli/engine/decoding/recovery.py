"""Recovery from a failed iteration: out of memory, or a kernel that does not run."""

from __future__ import annotations

from collections.abc import Callable

from dsbd_cli.engine.cache.caches import Caches
from dsbd_cli.engine.decoding.results import result_of
from dsbd_cli.engine.decoding.scheduler import RequestQueue, Scheduler
from dsbd_cli.engine.drafting.base import Drafter
from dsbd_cli.engine.iteration.request_state import RequestState
from dsbd_cli.engine.planning.planner import Planner, Shape
from dsbd_cli.errors import OutOfMemoryRowError, out_of_memory
from dsbd_cli.ops.select import kernel_failed


class Recovery:
    """Handler of failed iterations. It gives memory back and returns the requests to the queue, for a smaller batch or
    for tensor code."""

    def __init__(
        self,
        scheduler: Scheduler,
        caches: Caches,
        drafter: Drafter,
        leave_kernels: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        """leave_kernels: switch to tensor code; False where no kernel was in use. tell: takes a line for the user."""
        self._scheduler, self._caches, self._drafter = scheduler, caches, drafter
        self._leave_kernels, self._tell = leave_kernels, tell

    def after(
        self, error: Exception, running: list[RequestState], queue: RequestQueue, planner: Planner, shape: Shape | None
    ) -> bool:
        """Try what is left after an error. The batch has ended, and its running requests wait in the queue again.
        Return False where nothing is left to try, and the error must be raised.

        shape: of the iteration that failed, None where none had begun.
        """
        if out_of_memory(error):
            self._with_less_memory(running, queue, planner, shape)
            return True
        if kernel_failed(error) and self._leave_kernels():
            self._release()
            self._scheduler.retry(queue, running)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            self._tell(f"the run goes on without kernels, because one of them fails here ({reason})")
            return True
        return False

    def _with_less_memory(
        self, running: list[RequestState], queue: RequestQueue, planner: Planner, shape: Shape | None
    ) -> None:
        """Try fewer drafts where the planner has a choice, else half as many rows. A request that fails alone is tried
        once more with all memory given back, and then gets its error."""
        smaller = planner.out_of_memory(shape, len(running))
        self._release()
        alone = len(running) == 1 and not smaller
        if alone and not running[0].retried:
            running[0].retried = True
        elif alone:
            self._give_up(running.pop(), queue)
        if not smaller:
            self._scheduler.lower_rows(len(running))
        self._scheduler.retry(queue, running)

    def _give_up(self, job: RequestState, queue: RequestQueue) -> None:
        """Put out the error of a request that does not fit alone."""
        tokens, nodes = len(job.prompt) + job.max_new, self._scheduler.nodes([job])
        error = OutOfMemoryRowError(
            f"out of memory with this row alone ({tokens} tokens, {nodes} nodes in an iteration): "
            "shorten it, or lower num_beams, depth or drafts_per_layer"
        )
        queue.results.put(job.number, result_of(job, (), error))

    def _release(self) -> None:
        """Give the memory of all caches back."""
        self._caches.release()
        self._drafter.release()
