"""One MPI world: typed messages from any rank to any other, without a blocking call.

The only file that imports mpi4py. Buffers only (capital-letter calls), host memory only, and no collective between
start and end, so that a lost rollout rank stops nobody where the MPI library lets its neighbours live. `forget` leaves
such a rank alone: nothing is sent to it, what comes from it is ignored and counted.

Nothing happens behind the caller's back: messages move while `progress`, `poll`, `recv` or `flush` runs. A rank that
computes for long calls `progress()` now and then. Waiting is probing with a sleep that grows with the time waited: a
blocking MPI receive spins, and spinning ranks starve each other where there are more ranks than cores.

Two tags. TAG_FRAME carries a frame (codec.py), with its payload if that is small. Chunks and trailer of a large payload
follow on TAG_PAYLOAD; MPI keeps the order per source and tag, so the receiver posts them all when the frame is there.

Healthy end: every rank calls `close()`, which flushes and finalizes MPI within a deadline. A world that is not whole
any more ends without MPI_Finalize, which would wait for the lost ranks. Any other end: `abort(code)`
takes the whole world down with that exit code; leaving a `with World(...)` block by an exception does it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeVar, final

import mpi4py
import numpy as np

from areal_hpc.codec import Arrays, Codec, CodecError, Frame, Message, Payload, SequenceCheck, pack_trailer
from areal_hpc.lifelines import Lifelines
from areal_hpc.mpi_start import say_goodbye, start_mpi, unlink_shared_memory
from areal_hpc.parcels import Arrival, Parcel, Received
from areal_hpc.warm_blocks import WarmBlocks

mpi4py.rc.initialize = False  # importing this file starts nothing; World does
mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

T = TypeVar("T")
TAG_FRAME = 1
TAG_PAYLOAD = 2

MIN_SLEEP_S, MAX_SLEEP_S = 50e-6, 20e-3
START_S, STALL_S, EXIT_S = 300.0, 120.0, 60.0
ABORT_GRACE_S = 0.5  # MPICH's launcher drops what a rank has printed but it has not forwarded yet
HELD_BYTES = 4 * 1024**3
HELD_MESSAGES = 4096


class CommError(RuntimeError):
    """MPI, or a peer, failed."""


class DeadlineExceeded(CommError, TimeoutError):
    """What was waited for did not happen in time; the text says what, and who was last heard."""


@final
class World:
    """All ranks of the job, and this one's messages to and from them.

    Args:
        codec: the messages that may travel; the same on every rank.
        attempt: the Slurm attempt; messages of another one are ignored and counted in `check.stale`.
        stall_s: an arrival that stands still this long while this rank waits for it is an error.
        held_bytes: large payloads held for the caller; more are left with their senders until `poll` takes some.

    Attributes:
        expendable: ranks whose loss this one survives; an MPI error or a halt at one of them is no error here.
        lifelines: on ranks that send to them, tell at once when one of them dies.
        trouble: why ranks had to be forgotten.
        lost: forgotten ranks, with the number of messages from them that were ignored.
        whole: no rank of the world is known to be lost.
        comm: the communicator itself, for benchmarks and tests that need raw MPI.
        library: name and version of the MPI library.
    """

    def __init__(self, codec: Codec, attempt: int, *, stall_s: float = STALL_S, held_bytes: int = HELD_BYTES) -> None:
        if not MPI.Is_initialized():
            start_mpi(MPI.Init_thread, START_S)
        self.codec = codec
        self.attempt = attempt
        self.check = SequenceCheck(attempt)
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()
        self.library = " ".join(MPI.Get_library_version().splitlines()[0].split())
        self.expendable: frozenset[int] = frozenset()
        self.lifelines: Lifelines | None = None
        self.trouble: dict[int, str] = {}
        self.lost: dict[int, int] = {}
        self.whole = True
        self._given_up: list[object] = []
        self._stall_s = stall_s
        self._held_limit = held_bytes
        self._held_bytes = 0
        self._next_sequence: dict[int, int] = {}
        self._outbox: dict[int, deque[Parcel]] = {}
        self._arriving: dict[int, deque[Arrival]] = {}
        self._ready: deque[Received] = deque()
        self._blocks = WarmBlocks()
        self._moved = False
        self._status = MPI.Status()
        self._heard = "nothing since the start"
        self._heard_s = self._progressed_s = time.monotonic()
        self.comm, request = MPI.COMM_WORLD.Idup()
        self._wait(request.Test, START_S, f"all {self.size} ranks to start")
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        unlink_shared_memory()

    # ------------------------------------------------------------------------------------------------- sending
    def post(self, dest: int, message: Message, arrays: Arrays | None = None) -> None:
        """Hand a message over and hash it; waits for nobody. `flush` tells when everything has left.

        Arrays of a payload above the codec's inline size are not copied: do not change them until they have left.
        Messages from one rank to another arrive in the order of sending. To itself a rank may send as well.

        Raises CodecError when message and arrays do not fit the schema, CommError when MPI refuses.
        """
        if self.lifelines is not None and dest in self.expendable:
            self.look_at_lifelines()  # MPI must not send to the dead
        if dest in self.lost:
            return
        sequence = self._next_sequence.get(dest, 0)
        frame = self.codec.encode(message, arrays, source=self.rank, sequence=sequence, attempt=self.attempt)
        self._next_sequence[dest] = sequence + 1
        if dest == self.rank:
            incoming, copies = self.codec.decode(frame.joined())
            self._held_bytes += incoming.envelope.payload_bytes
            self._ready.append(Received(dest, incoming.message, copies))
            return
        try:
            requests = self._start(dest, frame)
        except MPI.Exception as error:
            self._fail(dest, error, "to")
            return
        parcel = Parcel(type(message).__name__, frame, requests, time.monotonic())
        self._outbox.setdefault(dest, deque()).append(parcel)

    def _start(self, dest: int, frame: Frame) -> list[MPI.Request]:
        def isend(part: bytes | memoryview, tag: int) -> MPI.Request:
            return self.comm.Isend([part, MPI.BYTE], dest, tag)

        if frame.inline:
            return [isend(frame.joined(), TAG_FRAME)]
        chunks = frame.chunks()
        requests = [isend(frame.header, TAG_FRAME), *(isend(chunk, TAG_PAYLOAD) for chunk in chunks)]
        crcs = []
        for index, chunk in enumerate(chunks):  # hashed while the other side takes the first ones
            crcs.append(frame.crc(index, chunk))
            requests[-1].Test()  # moves bytes on transports that need the sender's help
        return [*requests, isend(pack_trailer(crcs), TAG_PAYLOAD)]

    def unsent(self) -> list[tuple[int, str, float]]:
        """(destination, message type, seconds since it was posted) of everything that has not left yet."""
        now = time.monotonic()
        return [(dest, parcel.name, now - parcel.posted_s) for dest, queue in self._outbox.items() for parcel in queue]

    def flush(self, timeout_s: float) -> None:
        """Return when all messages have left. Raises DeadlineExceeded naming those that have not."""
        self._wait(self._look_for(lambda: not self._outbox), timeout_s, "its messages to leave")

    # ----------------------------------------------------------------------------------------------- receiving
    def poll(self) -> Received | None:
        """The next complete message from anybody, or None; never waits.

        Raises CodecError naming the peer whose bytes do not fit, DeadlineExceeded when an arrival has stalled.
        """
        if not self._ready:
            self.progress()
        if not self._ready:
            return None
        received = self._ready.popleft()
        self._held_bytes -= sum(array.nbytes for array in received.arrays.values())
        return received

    def recv(self, timeout_s: float) -> Received:
        """The next message from anybody. Raises DeadlineExceeded saying who was last heard, else as `poll`."""
        return self._wait(self.poll, timeout_s, "a message")

    def progress(self) -> None:
        """Move messages in both directions without waiting."""
        now = time.monotonic()
        # Only time spent here counts as waiting for a peer: a rank that computed for minutes has not waited.
        waited_s, self._progressed_s = min(1.0, now - self._progressed_s), now
        self._empty_outbox()
        while len(self._ready) + sum(map(len, self._arriving.values())) < HELD_MESSAGES:
            matched = self.comm.Improbe(MPI.ANY_SOURCE, TAG_FRAME, self._status)
            if matched is None:
                break
            self._match(matched, self._status.Get_source(), self._status.Get_count(MPI.BYTE))
        for source, queue in list(self._arriving.items()):
            try:
                while queue and self._advance(queue[0], waited_s):
                    if queue.popleft().payload:
                        break  # one large payload a time: the caller may be done with its block before the next one
            except (CodecError, MPI.Exception) as error:
                self._fail(source, error, "from")
            if not queue:
                self._arriving.pop(source, None)

    def _empty_outbox(self) -> None:
        for dest, queue in list(self._outbox.items()):
            try:
                while queue and MPI.Request.Testall(queue[0].requests):
                    queue.popleft()
                    self._moved = True
            except MPI.Exception as error:
                self._fail(dest, error, "to")
            if not queue:
                self._outbox.pop(dest, None)

    def _match(self, matched: MPI.Message, source: int, num_bytes: int) -> None:
        if num_bytes > self.codec.max_frame_bytes:
            what = f"frame of {num_bytes} bytes, limit {self.codec.max_frame_bytes}"
            raise self._blamed(CodecError(what), f"from rank {source}")
        frame = np.empty(num_bytes, np.uint8)
        arrival = Arrival(source, frame, matched.Irecv([frame, MPI.BYTE]))
        if source in self.lost:
            self.lost[source] += 1
            self._given_up.append(arrival)
            return
        # Behind earlier messages of the same source: order is kept, and payload receives are posted in that order.
        self._arriving.setdefault(source, deque()).append(arrival)

    def _advance(self, arrival: Arrival, waited_s: float) -> bool:
        """Go on with an arrival; True when it is complete and delivered."""
        if (arrival.incoming is None and not self._open(arrival)) or not self._collect(arrival):
            arrival.idle_s += waited_s
            if arrival.idle_s > self._stall_s and arrival.source not in self.expendable:
                raise DeadlineExceeded(f"rank {self.rank}: nothing more came for {self._stall_s:.1f} s: {arrival}")
            return False
        assert arrival.incoming is not None and arrival.arrays is not None
        if arrival.wanted:
            self._ready.append(Received(arrival.source, arrival.incoming.message, arrival.arrays))
        else:
            self._held_bytes -= arrival.incoming.envelope.payload_bytes
        return True

    def _open(self, arrival: Arrival) -> bool:
        """Decode the frame if it is here."""
        if not arrival.request.Test():
            return False
        incoming = self.codec.decode_header(arrival.frame.data)
        envelope = incoming.envelope
        if envelope.source != arrival.source:
            raise CodecError(f"the envelope names rank {envelope.source} as its source")
        arrival.wanted = self.check.accept(envelope)
        arrival.incoming = incoming
        if envelope.chunk_bytes == 0:
            arrival.arrays = self.codec.unpack(incoming, arrival.frame.data)
            self._held_bytes += envelope.payload_bytes
        self._heard, self._heard_s = f"{type(incoming.message).__name__} from rank {arrival.source}", time.monotonic()
        self._moved = True
        return True

    def _collect(self, arrival: Arrival) -> bool:
        """Take what is here of a large payload; True when the arrays are complete."""
        if arrival.arrays is not None:
            return True
        assert arrival.incoming is not None
        size = arrival.incoming.envelope.payload_bytes
        if arrival.payload is None:
            if self._held_bytes and self._held_bytes + size > self._held_limit:
                arrival.idle_s = 0.0  # not the sender's fault: `poll` makes room
                return False
            self._held_bytes += size
            payload = Payload(arrival.incoming, self._blocks.take)
            arrival.post(
                lambda part: self.comm.Irecv([part, MPI.BYTE], arrival.source, TAG_PAYLOAD), payload, self._status
            )
            self._moved = True
        if arrival.take(self._status):
            arrival.idle_s, self._moved = 0.0, True
        return arrival.arrays is not None

    # ------------------------------------------------------------------------------------------------- waiting
    def _wait(self, look: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Call `look` until it returns something true, sleeping between two calls, longer the longer nothing moves."""
        start = quiet_since = time.monotonic()
        while not (result := look()):
            now = time.monotonic()
            if now - start >= timeout_s:
                raise DeadlineExceeded(f"rank {self.rank} waited {now - start:.1f} s for {what}; {self._situation()}")
            if self._moved:
                self._moved, quiet_since = False, now
                continue
            # A fraction of the time waited: a long wait costs no CPU, and no wait is prolonged by more than that.
            time.sleep(min(MAX_SLEEP_S, max(MIN_SLEEP_S, (now - quiet_since) / 16)))
        return result

    def _look_for(self, done: Callable[[], bool]) -> Callable[[], bool]:
        """A look of `_wait` that also moves messages, both ways."""

        def look() -> bool:
            self.progress()
            return done()

        return look

    def _situation(self) -> str:
        """What a person needs to know about a wait that was too long."""
        parts = [f"last heard: {self._heard}, {time.monotonic() - self._heard_s:.1f} s ago"]
        parts += [f"arriving: {queue[0]}" for queue in self._arriving.values()]
        parts += [f"unsent: {name} to rank {dest}, posted {age_s:.1f} s ago" for dest, name, age_s in self.unsent()[:5]]
        return "; ".join(parts)

    def _fail(self, peer: int, error: Exception, direction: str) -> None:
        """Raise what went wrong with a peer; without an expendable one this rank goes on."""
        blamed = self._blamed(error, f"{direction} rank {peer}")
        if peer not in self.expendable or isinstance(blamed, CodecError):
            raise blamed from error
        self.trouble[peer] = f"cannot be reached: {blamed}"
        self.forget(peer)

    def _blamed(self, error: Exception, peer: str) -> Exception:
        """The error to raise: this rank and the peer in front of what went wrong."""
        where = f"rank {self.rank}: message {peer}"
        if isinstance(error, MPI.Exception) and error.Get_error_class() != MPI.ERR_TRUNCATE:
            return CommError(f"{where}: {error.Get_error_string()}")
        return CodecError(f"{where}: {error if isinstance(error, CodecError) else 'more bytes than announced'}")

    # ------------------------------------------------------------------------------------------- lost ranks, the end
    def look_at_lifelines(self) -> None:
        """Forget the ranks that have died."""
        for rank in self.lifelines.look() if self.lifelines else ():
            self.trouble[rank] = "died without a word"
            self.forget(rank)

    def forget(self, rank: int) -> None:
        """This rank is lost: what is on the way to and from it is given up. MPI keeps the buffers; nothing waits."""
        if rank in self.lost:
            return
        self.lost[rank], self.whole = 0, False
        for queues in (self._outbox, self._arriving):
            self._given_up.append(queues.pop(rank, None))
        here = [received for received in self._ready if received.source == rank]
        self.lost[rank] += len(here)
        self._held_bytes -= sum(array.nbytes for received in here for array in received.arrays.values())
        self._ready = deque(received for received in self._ready if received.source != rank)

    def dismiss(self, rank: int, message: Message) -> None:
        """One message, the last, to a forgotten rank that may live all the same."""
        num_ignored = self.lost.pop(rank)
        self.post(rank, message)
        self.lost[rank] = num_ignored
        self._given_up.append(self._outbox.pop(rank, None))

    def close(self, timeout_s: float = EXIT_S, exit_code: int = 0) -> None:
        """Let all messages leave and finalize MPI once every rank has come here; a rank that waits here sleeps.

        After `timeout_s` without one of them (it may be lost) the process says so and ends without MPI_Finalize, with
        `exit_code`, which should be the one it would have ended with.
        """
        if MPI.Is_finalized():
            return
        try:
            self.flush(timeout_s)
            if not self.whole:
                self.leave(exit_code)
            # MPI_Finalize spins, and for ever if a rank is lost: enter it when all others do.
            self._wait(self._look_for(self.comm.Ibarrier().Test), timeout_s, "all ranks to close")
        except DeadlineExceeded as error:
            print(f"areal-hpc: leaving without MPI_Finalize: {error}", file=sys.stderr, flush=True)
            os._exit(exit_code)
        faulthandler.dump_traceback_later(EXIT_S, exit=True)  # needs no GIL, which mpi4py holds in there
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()

    def leave(self, exit_code: int) -> NoReturn:
        """End this process alone, at once and without MPI_Finalize."""
        say_goodbye()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def abort(self, code: int) -> NoReturn:
        """End every rank of the world with this exit code, at once."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(ABORT_GRACE_S)
        faulthandler.dump_traceback_later(EXIT_S, exit=True)
        MPI.COMM_WORLD.Abort(code)
        os._exit(code)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        traceback.print_exception(error)
        code = getattr(error, "code", 1)  # SystemExit and RunError bring one
        self.abort((code if isinstance(code, int) else 1) or 1)
