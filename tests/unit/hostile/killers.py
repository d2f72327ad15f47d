"""Those that would live on, or kill."""

from __future__ import annotations

from tests.unit.hostile.base import ASSERT, CALL, STDIN, hostile

hostile(
    "daemon",
    CALL,
    """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            time.sleep(1000)
        os._exit(0)
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "thread_that_stays",
    CALL,
    """
    import threading, time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "thread_of_a_script",
    STDIN,
    """
    import threading, time
    threading.Thread(target=time.sleep, args=(1000,)).start()
    print(4)
    """,
    wall_s=0.7,
)
hostile(
    "child_that_holds_the_output",
    STDIN,
    """
    import os, time
    if os.fork() == 0:
        time.sleep(1000)
    print(4)
    """,
    "correct",
)
hostile(
    "kill_everybody",
    ASSERT,
    """
    import os
    f = lambda x: os.kill(-1, 9) or 4
    """,
)
hostile(
    "kill_parent",
    CALL,
    """
    import os
    for s in (9, 15, 2, 19, 1, 3, 17, 12):
        os.kill(os.getppid(), s)
    f = lambda x: 4
    """,
    "correct",
)
hostile(
    "kill_the_tests",
    ASSERT,
    """
    import os
    def f(x):
        for pid in range(2, 50):
            if pid != os.getpid():
                try:
                    os.kill(pid, 15)
                except OSError:
                    pass
        return 4
    """,
)
hostile(
    "stop_the_tests",
    ASSERT,
    """
    import os
    def f(x):
        for pid in range(2, 50):
            if pid != os.getpid():
                try:
                    os.kill(pid, 19)
                except OSError:
                    pass
        return 4
    """,
    wall_s=0.7,
)
hostile(
    "limits_of_process_1",
    ASSERT,
    """
    import resource, os, time
    def f(x):
        for pid in (1, os.getppid()):
            resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0))
        time.sleep(0.5)
        return 5
    """,
    wall_s=2.0,
)
hostile(
    "alarm",
    ASSERT,
    """
    import signal
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    f = lambda x: [0 for _ in range(10**9)]
    """,
)
