"""One sandbox for many programs, one after the other: none finds a trace of another, or it gets a new sandbox."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from areal_hpc.sandbox import isolation, pool
from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import Limits
from areal_hpc.sandbox.pool import lent
from tests.unit import hostile
from tests.unit.hostile.base import of_the_program
from tests.unit.hostile.leftovers import CLEAN, LOOK, changes_the_place, limits_alone, run
from tests.unit.sandboxes import as_nobody, need

FULL = pytest.mark.parametrize("mode", isolation.FULL)


@pytest.fixture(autouse=True)
def nothing_waits():
    pool.close_idle()
    yield
    pool.close_idle()


LEFT_AND_REMOVED = {
    "files": "for place in ('/tmp', '/dev/shm'):\n    open(place + '/.note', 'w').write('x' * 99999)",
    "directories": "os.makedirs('a/b/c')\nopen('a/b/c/d', 'w').close()",
    "no rights": "os.mkdir('a')\nopen('a/b', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)",
    "links": "os.symlink('/usr', 'a')\nos.symlink('nowhere', 'b')\nos.mkfifo('c')\nopen('d', 'w')\nos.link('d', 'e')",
    "processes": "if os.fork() == 0:\n    os.setsid()\n    open('/tmp/late', 'w')\n    time.sleep(99)",
    "what it changed of itself": "os.umask(0o777)\nos.chdir('/usr')\nsys.modules.clear()",
}


@FULL
@pytest.mark.parametrize("left", LEFT_AND_REMOVED.values(), ids=LEFT_AND_REMOVED)
def test_the_next_program_finds_nothing(mode, left):
    need(mode)
    with lent(mode) as sandbox:
        first, space = sandbox._control, sandbox.pid_namespace
        sandbox.program(LANGUAGES["python"], f"import os, sys, time\n{left}\nprint('done')")
        assert sandbox.run_main("").output == b"done\n"
    assert of_the_program(space) == []
    assert run(mode, LOOK) == (CLEAN, first)
    assert run(mode, "import os\nprint(os.umask(0))") == ("18\n", first)


STUBBORN = {
    "deeper than a path can name": "for _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')",
    "a label": "os.setxattr('/tmp', 'user.note', b'x')",
    "rights of the place": "os.chmod('/tmp', 0o777)",
}


@FULL
@pytest.mark.parametrize("left", STUBBORN.values(), ids=STUBBORN)
def test_what_cannot_be_undone_costs_the_sandbox(mode, left):
    """An ordinary user's programs own the place; root's run as nobody, and cannot change its labels and rights."""
    need(mode)
    if os.geteuid():
        assert changes_the_place(mode, left) == ("done\n", CLEAN, True)
        return
    said, found, is_another = changes_the_place(mode, left)
    assert (said, found, is_another) in ((("done\n", CLEAN, True)), ("", CLEAN, False))
    script = f"from tests.unit.hostile import leftovers as t; print(t.changes_the_place({mode!r}, {left!r}))"
    done = as_nobody(["-c", script], mode)
    assert done.stdout == f"{('done' + chr(10), CLEAN, True)}\n", done.stderr


@FULL
def test_after_a_test_that_did_not_end_well_there_is_another_one(mode):
    """A test may lie unread in the socket."""
    need(mode)
    with lent(mode, Limits(wall_s=0.5)) as sandbox:
        first, inside = sandbox._control, hostile.alive(sandbox.pid_namespace)
        sandbox.program(LANGUAGES["python"], "import time\ndef f(x):\n    time.sleep(99)")
        assert not sandbox.check("", "f(0)", None)[0]
    with lent(mode, Limits(wall_s=0.5)) as sandbox:
        assert sandbox._control is not first and len(inside) == 1 and hostile.running(inside) == []


@FULL
def test_who_gets_the_one_that_waits(mode):
    need(mode)
    with lent(mode) as sandbox:
        first, inside = sandbox._control, hostile.alive(sandbox.pid_namespace)
    assert len(hostile.running(inside)) == 1
    with lent(mode, Limits(wall_s=5.0)) as sandbox:
        other, waiting = sandbox._control, hostile.alive(sandbox.pid_namespace)
    assert other is not first and hostile.running(inside) == []  # one waits, of the limits that were asked for last
    assert run(mode, "", Limits(wall_s=5.0))[1] is other
    os.kill(waiting[0], signal.SIGKILL)
    said, third = run(mode, "print(1)", Limits(wall_s=5.0))
    assert said == "1\n" and third is not other
    in_thread: list[object] = []
    thread = threading.Thread(target=lambda: in_thread.append(run(mode, "", Limits(wall_s=5.0))[1]))
    thread.start()
    thread.join(30)
    assert in_thread and in_thread[0] is not third


@FULL
def test_a_forked_process_leaves_its_parents_alone(mode):
    need(mode)
    _, first = run(mode, "")
    child = os.fork()
    if child == 0:
        os._exit(0 if run(mode, "")[1] is not first else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run(mode, "print(1)") == ("1\n", first)


@FULL
def test_an_exception_of_the_caller_ends_it(mode):
    need(mode)
    with pytest.raises(KeyError), lent(mode) as sandbox:
        inside = hostile.alive(sandbox.pid_namespace)
        raise KeyError
    assert len(inside) == 1 and hostile.running(inside) == []


def test_limits_alone_are_never_used_again():
    if os.geteuid():
        assert limits_alone()
        return
    script = "from tests.unit.hostile import leftovers as t; print(t.limits_alone())"
    done = as_nobody(["-c", script], "rlimits")
    assert done.stdout == "True\n", done.stderr
