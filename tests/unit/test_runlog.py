"""The run log: what is written comes back, at any moment, whatever happens to the writer or the file."""

import json
import os
import random
import subprocess
import sys
import time
import warnings
from contextlib import suppress

import h5py
import numpy as np
import pytest

from areal_hpc import logschema
from areal_hpc.logcodes import Code, Fate, Finish, Outcome
from areal_hpc.logschema import STEPS, TABLES, TRAJECTORIES
from areal_hpc.runlog import RunLog, RunLogError, RunLogWriter
from areal_hpc.trajectory import Trajectory

WRITE = {"ranks", "trajectories", "weight_loads", "activity", "evaluations"}  # the writer's methods have their names


def made_up(table, start, stop):
    """Rows start..stop-1 of a table; every value follows from the number of its row and its column."""
    rows = {}
    for position, column in enumerate(table.columns):
        numbers = np.arange(start, stop) + position
        if column.dtype.startswith("S"):
            rows[column.name] = [f"{column.name} {n} \N{GREEK SMALL LETTER ETA}" for n in numbers]
        elif column.labels:
            rows[column.name] = [column.labels[n % len(column.labels)] for n in numbers]
        elif column.dtype == "?":
            rows[column.name] = numbers % 2 == 0
        else:
            rows[column.name] = numbers / 4 if "f" in column.dtype else numbers
    return rows


def write(writer, table, start, stop):
    rows = made_up(table, start, stop)
    if table.name in WRITE:
        getattr(writer, table.name)(rows)
        return
    for i in range(stop - start):
        row = {name: values[i] for name, values in rows.items()}
        if table.name == "events":
            writer.event(**row)
        else:
            (writer.step if table is STEPS else writer.weight_update)(row)


def assert_rows(frame, table, num_rows):
    expected = made_up(table, 0, num_rows)
    assert list(frame.columns) == list(expected)
    assert len(frame) == num_rows
    for name, values in expected.items():
        assert frame[name].tolist() == list(values), f"{table.name}/{name}"


def run(code, *args, **kwargs):
    """Python in a process of its own, with this module at hand as `t`."""
    head = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_runlog as t\n"
    return subprocess.Popen([sys.executable, "-c", head + code, *map(str, args)], text=True, **kwargs)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log" / "attempt_1.h5"


@pytest.fixture
def finished(path):
    """A closed log with 3000 rows of trajectories (three chunks) and 40 rows of every other table."""
    with RunLogWriter(path, attributes={}) as writer:
        for table in TABLES:
            write(writer, table, 0, 3000 if table is TRAJECTORIES else 40)
    return path


# ------------------------------------------------------------------------------------------------------- round trip
@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_every_table_comes_back_as_it_was_written(path, table):
    with RunLogWriter(path, attributes={}) as writer:
        for start, stop in ((0, 1), (1, 2), (2, 300), (300, 1100)):
            write(writer, table, start, stop)
            writer.flush()
    with RunLog(path) as log:
        assert_rows(getattr(log, table.name), table, 1100)
        assert log.problems == []


def test_a_log_without_rows_has_all_columns(path):
    RunLogWriter(path, attributes={}).close()
    log = RunLog(path)
    for table in TABLES:
        assert_rows(getattr(log, table.name), table, 0)
    assert log.summary()["steps"] == 0


def test_attributes_of_the_run(path):
    attributes = {"config": "a" * 100_000, "attempt": 2, "eta": 0.5, "resumed": False, "hosts": ["n1", "n2"]}
    RunLogWriter(path, attributes=attributes).close()
    read = RunLog(path).attributes
    assert read == attributes | {"format": "areal_hpc run log", "schema_version": logschema.SCHEMA_VERSION}


@pytest.mark.parametrize("attributes", [{"schema_version": 9}, {"x": {}}, {"x": [None]}])
def test_other_attributes_are_refused(path, attributes):
    with pytest.raises(ValueError, match=f"attribute '{next(iter(attributes))}'"):
        RunLogWriter(path, attributes=attributes)


def test_codes_may_be_given_as_integers_or_members(path):
    rows = made_up(TRAJECTORIES, 0, 2)
    rows |= {"outcome": [Outcome.TIMEOUT, Outcome.CORRECT], "finish": np.array([1, 0], np.uint8)}
    with RunLogWriter(path, attributes={}) as writer:
        writer.trajectories(rows)
    frame = RunLog(path).trajectories
    assert frame["outcome"].tolist() == ["timeout", "correct"]
    assert frame["finish"].tolist() == ["length", "eos"]
    assert frame["outcome"].cat.categories.tolist() == ["correct", "wrong", "unparsed", "timeout", "error", "truncated"]


def test_text_beyond_the_width_is_cut_visibly_and_stays_distinct(path):
    long = ["\N{GREEK SMALL LETTER ETA}" * 400 + end for end in "ab"]
    with RunLogWriter(path, attributes={}) as writer:
        for text in long:
            writer.event(0.0, "note", text)
    first, second = RunLog(path).events["text"]
    assert first != second
    for text in (first, second):
        assert 250 <= len(text.encode()) <= 256
        assert text[-9] == "~" and set(text[:-9]) == {"\N{GREEK SMALL LETTER ETA}"}


def test_unknown_numbers(path):
    rows = made_up(TRAJECTORIES, 0, 2) | {"consume_s": [None, float("inf")], "reward": [float("nan"), 1]}
    with RunLogWriter(path, attributes={}) as writer:
        writer.trajectories(rows)
    frame = RunLog(path).trajectories
    assert np.isnan(frame["consume_s"][0]) and frame["consume_s"][1] == np.inf and np.isnan(frame["reward"][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, r"missing columns \['reward'\]"),
        ({"rewards": [1, 2]}, r"unknown columns \['rewards'\]"),
        ({"reward": [1.0]}, "column 'reward' has 1 rows, column 'group_id' has 2"),
        ({"reward": [[1.0], [2.0]]}, r"column 'reward' takes a 1-D sequence, got shape \(2, 1\)"),
        ({"sample": [0, 1.5]}, r"column 'sample' \(i4\) cannot hold the value .*1.5"),
        ({"sample": [0, 2**31]}, r"column 'sample' \(i4\) cannot hold the value .*2147483648"),
        ({"sample": [0, float("nan")]}, r"column 'sample' \(i4\) cannot hold the value .*nan"),
        ({"sample": [0, None]}, "column 'sample'"),
        ({"reward": ["good", "bad"]}, "column 'reward'"),
        ({"prompt_id": [1, 2]}, "column 'prompt_id'"),
        ({"outcome": ["correct", "right"]}, r"column 'outcome' .*\['right'\] not among correct, wrong"),
        ({"outcome": [0, 6]}, "column 'outcome' .*codes run from 0 to 5"),
    ],
)
def test_wrong_rows_are_named_and_nothing_of_them_is_kept(path, change, message):
    rows = {name: values for name, values in (made_up(TRAJECTORIES, 0, 2) | change).items() if values is not None}
    expected = pytest.raises(ValueError, match=f"(?s)table trajectories: .*{message}")
    with RunLogWriter(path, attributes={}) as writer, expected:
        writer.trajectories(rows)
    assert RunLog(path).trajectories.empty


# ------------------------------------------------------------------------------------------------------------ tokens
def trajectory(group_id, sample, num_prompt, num_response, turns=None):
    total = num_prompt + num_response
    tokens = np.arange(total, dtype=np.int32) + 1000 * group_id
    versions = np.arange(num_response, dtype=np.int32)
    return Trajectory(group_id, sample, tokens, num_prompt, -versions.astype(np.float32) / 8, versions, turns)


def test_tokens_come_back_by_group_and_sample(path):
    written = [trajectory(g, s, 1 + g % 3, 1 + 50 * s) for g in range(60) for s in range(3)]
    with RunLogWriter(path, attributes={}, tokens=True) as writer:
        for part in (written[:1], [], written[1:100], written[100:]):
            writer.tokens(part)
            if len(part) != 99:  # two calls in one flush
                writer.flush()
    log = RunLog(path)
    for t in written[::-1]:
        read = log.tokens(t.group_id, t.sample)
        assert read["num_prompt"] == t.num_prompt
        for name in ("tokens", "logprobs", "versions"):
            assert read[name].dtype == getattr(t, name).dtype
            np.testing.assert_array_equal(read[name], getattr(t, name))
        np.testing.assert_array_equal(read["turns"], np.zeros(t.num_response, np.int16))
    with pytest.raises(KeyError, match="60/0"):
        log.tokens(60, 0)


def test_turns_of_tokens_come_back_and_old_logs_have_none(path, monkeypatch):
    turns = np.array([0, 0, -1, 1], np.int16)
    with RunLogWriter(path, attributes={}, tokens=True) as writer:
        writer.tokens([trajectory(0, 0, 2, 4, turns), trajectory(1, 0, 2, 1)])
    read = RunLog(path).tokens(0, 0)["turns"]
    assert read.dtype == np.int16 and read.tolist() == turns.tolist()
    assert RunLog(path).tokens(1, 0)["turns"].tolist() == [0]
    with h5py.File(path, "r+") as file:  # as written before there were turns
        del file["response_tokens/turn"]
    assert sorted(RunLog(path).tokens(0, 0)) == ["logprobs", "num_prompt", "tokens", "versions"]


def test_a_log_without_tokens_says_so(path):
    with RunLogWriter(path, attributes={}) as writer, pytest.raises(RunLogError, match="tokens=True"):
        writer.tokens([trajectory(0, 0, 1, 1)])
    with pytest.raises(RunLogError, match="log.tokens = false"):
        RunLog(path).tokens(0, 0)


# ----------------------------------------------------------------------------------------- reading while it is written
WRITER = """
import itertools
writer = t.RunLogWriter(sys.argv[1], attributes={}, tokens=True)
for flush in itertools.count():
    for table in t.TABLES:  # as many rows in every table
        t.write(writer, table, 7 * flush, 7 * flush + 7)
    writer.tokens([t.trajectory(flush, 0, 2, 40)])
    writer.flush()
    print(7 * flush + 7, flush=True)
    if len(sys.argv) > 2 and flush == int(sys.argv[2]):
        writer.close()
        break
"""


def wait_until_there(path):
    deadline = time.monotonic() + 60
    while True:
        try:
            return RunLog(path)
        except RunLogError:
            assert time.monotonic() < deadline, "the writer did not start"
            time.sleep(0.02)


@pytest.mark.fault("log read while it is written", row=27)
def test_a_reader_beside_the_writer_sees_whole_flushes_only(path):
    """All tables get equally many rows per flush, so a torn flush would show as unequal tables or wrong values."""
    writer = run(WRITER, path, 150, stdout=subprocess.DEVNULL)
    try:
        log, seen = wait_until_there(path), set()
        deadline = time.monotonic() + 120
        while max(seen, default=0) < 7 * 151:
            assert time.monotonic() < deadline
            num_rows = len(log.refresh().steps)
            assert num_rows % 7 == 0 and num_rows >= max(seen, default=0)
            seen.add(num_rows)
            for table in TABLES:
                assert_rows(getattr(log, table.name), table, num_rows)
            if num_rows:
                np.testing.assert_array_equal(log.tokens(num_rows // 7 - 1, 0)["versions"], np.arange(40))
            assert log.problems == []
        assert len(seen) > 5, f"the writer was never seen at work: {seen}"
        assert writer.wait(60) == 0
    finally:
        writer.kill()
        writer.wait()
    log.close()
    with h5py.File(path, "r") as file:  # complete, so any reader will do; columns are as long as the table
        assert file["steps/reward_mean"].shape == (7 * 151,)


def test_a_file_opened_for_appending_by_someone_else(path):
    """A live or killed log is not to be had in another writing mode, and nothing happens to it."""
    writer = run(WRITER, path, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    try:
        writer.stdout.readline()
        with pytest.raises(OSError):
            h5py.File(path, "a")
        for _ in range(5):
            flushed = int(writer.stdout.readline())
    finally:
        writer.kill()
        writer.wait()
    with pytest.raises(OSError):
        h5py.File(path, "r+")
    log = RunLog(path)
    assert log.problems == [] and len(log.steps) >= flushed


def test_a_second_writer_is_refused(finished):
    before = finished.read_bytes()
    with pytest.raises(RunLogError, match="exists already"):
        RunLogWriter(finished, attributes={})
    assert finished.read_bytes() == before


def test_a_second_writer_of_a_live_log_is_refused(path):
    with RunLogWriter(path, attributes={}) as writer:
        with pytest.raises(RunLogError, match="exists already"):
            RunLogWriter(path, attributes={})
        write(writer, STEPS, 0, 3)
    assert_rows(RunLog(path).steps, STEPS, 3)


def test_no_directory_can_be_made(tmp_path):
    (tmp_path / "log").write_text("a file where the directory should be")
    with pytest.raises(RunLogError, match="cannot create the run log"):
        RunLogWriter(tmp_path / "log" / "attempt_1.h5", attributes={})


# -------------------------------------------------------------------------------------------------------- full disk
FULL_DISK = """
import os, resource, signal, json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
import areal_hpc.runlog_writer
areal_hpc.runlog_writer.SPARE_BYTES = 400_000
writer = t.RunLogWriter(sys.argv[1], attributes={})
refused = []
for flush in range(60):
    t.write(writer, t.TRAJECTORIES, 200 * flush, 200 * flush + 200)
    t.write(writer, t.STEPS, flush, flush + 1)
    try:
        writer.flush()
    except t.RunLogError as error:
        refused.append((flush, str(error)))
    if flush == 0:
        limit(os.path.getsize(sys.argv[1]) + 100_000)
    if len(refused) == 3:
        limit(resource.RLIM_INFINITY)
writer.close()
writer.close()
print(json.dumps(refused))
"""


def test_rows_refused_by_a_full_disk_are_written_once_there_is_room(path):
    process = run(FULL_DISK, path, stdout=subprocess.PIPE)
    refused = json.loads(process.communicate(timeout=120)[0])
    assert process.returncode == 0
    (first, message), (second, _), (third, _) = refused
    assert first > 0 and (second, third) == (first + 1, first + 2)
    assert "cannot write the run log" in message and "df -h" in message and str(path) in message
    log = RunLog(path)
    assert_rows(log.trajectories, TRAJECTORIES, 12_000)
    assert_rows(log.steps, STEPS, 60)
    assert log.problems == []


def test_what_was_flushed_before_the_disk_was_full_can_be_read(path):
    give_up = "if len(refused) == 3:"
    code = FULL_DISK.replace(give_up, f"{give_up}\n        print(json.dumps(refused), flush=True); os._exit(0)")
    process = run(code, path, stdout=subprocess.PIPE)
    first = json.loads(process.communicate(timeout=120)[0])[0][0]
    log = RunLog(path)
    assert_rows(log.trajectories, TRAJECTORIES, 200 * first)
    assert log.problems == []


def test_a_writer_that_hdf5_failed_stays_broken(path, monkeypatch):
    writer = RunLogWriter(path, attributes={})
    write(writer, STEPS, 0, 3)
    writer.flush()
    write(writer, STEPS, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_append", lambda tables: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(RunLogError, match="Input/output error.*cannot be continued"):
            writer.flush()
    with pytest.raises(RunLogError, match="cannot be continued"):
        writer.flush()
    with pytest.raises(RunLogError, match="cannot be continued"):
        writer.close()
    assert_rows(RunLog(path).steps, STEPS, 3)


# ---------------------------------------------------------------------------------------------------- damaged files
@pytest.mark.fault("log truncated", row=15)
def test_a_truncated_log_gives_a_true_prefix_and_names_the_rest(finished, tmp_path):
    data = finished.read_bytes()
    cuts = random.Random(2)
    last = len(data.rstrip(b"\0")) - 1  # what is left of the last page may be empty
    lengths = [0, 7, 30_000, last] + [cuts.randrange(len(data)) for _ in range(5)]
    readable = 0
    for length in lengths:
        cut = tmp_path / f"cut_at_{length}.h5"
        cut.write_bytes(data[:length])
        try:
            log = RunLog(cut)
        except RunLogError as error:
            assert str(cut) in str(error)
            continue
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            problems = log.problems
        assert problems and len(warned) == len(problems)
        with suppress(RunLogError):
            assert log.summary()["problems"] == problems
        for table in TABLES:
            frame = getattr(log, table.name)
            readable += len(frame)
            if len(frame):
                expected = made_up(table, 0, len(frame))
                assert all(frame[name].tolist() == list(expected[name]) for name in frame)
        assert cut.read_bytes() == data[:length]
    assert readable > 3000  # cuts behind the first chunks leave rows to read


def test_tokens_of_a_truncated_log_are_true_or_refused(path, tmp_path):
    written = [trajectory(g, 0, 100, 4000) for g in range(60)]
    with RunLogWriter(path, attributes={}, tokens=True) as writer:
        for t in written:
            writer.tokens([t])
            writer.flush()
    data, cut = path.read_bytes(), tmp_path / "cut.h5"
    cut.write_bytes(data[: len(data) * 2 // 3])
    log, refused = RunLog(cut), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in written:
            try:
                np.testing.assert_array_equal(log.tokens(t.group_id, 0)["tokens"], t.tokens)
            except RunLogError as error:
                assert "cut off" in str(error)
                refused.append(t.group_id)
        assert any("sequence_tokens" in problem for problem in log.problems)
    assert refused and refused == list(range(refused[0], 60)) and refused[0] > 0


@pytest.mark.fault("log overwritten at random", row=15)
def test_bytes_overwritten_at_random_do_no_more_harm_than_a_message(finished, tmp_path):
    random_ = random.Random(3)
    outcomes = set()
    for number in range(8):
        data = bytearray(finished.read_bytes())
        for _ in range(40):
            data[random_.randrange(80_000)] = random_.randrange(256)  # where HDF5 keeps its own tables
        bad = tmp_path / f"bad{number}.h5"
        bad.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcomes.add("problems" if RunLog(bad).problems else "fine")
            except RunLogError:
                outcomes.add("refused")
    assert "problems" in outcomes


def test_a_file_in_the_hands_of_another_program_or_none_of_ours(tmp_path):
    path = tmp_path / "x.h5"
    code = "f = t.h5py.File(sys.argv[1], 'w'); f['a'] = 1; f.flush(); print('open', flush=True); sys.stdin.read()"
    other = run(code, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    with pytest.raises(RunLogError, match="without SWMR .close that program"):
        RunLog(path)
    other.communicate()
    with pytest.raises(RunLogError, match="not a run log"):
        RunLog(path)
    path.write_text("not HDF5 at all")
    with pytest.raises(RunLogError, match="not a run log"):
        RunLog(path)


# ------------------------------------------------------------------------------------------------------ run directory
def test_a_run_directory_means_its_newest_attempt(tmp_path):
    for attempt in (1, 9, 10):
        RunLogWriter(tmp_path / "log" / f"attempt_{attempt}.h5", attributes={"attempt": attempt}).close()
    (tmp_path / "log" / "attempt_11.h5.bak").touch()
    assert RunLog(tmp_path).attributes["attempt"] == 10
    assert RunLog(tmp_path, attempt=9).attributes["attempt"] == 9
    assert RunLog(tmp_path / "log" / "attempt_1.h5").attributes["attempt"] == 1
    with pytest.raises(RunLogError, match=r"no attempt 2; there are \[1, 9, 10\]"):
        RunLog(tmp_path, attempt=2)


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_no_log_there(tmp_path, name):
    with pytest.raises(RunLogError, match="neither a log file nor a run directory"):
        RunLog(tmp_path / name)


def test_summary_by_hand(path):
    def step(number, **values):
        return {name: column[0] for name, column in made_up(STEPS, number, number + 1).items()} | values

    with RunLogWriter(path, attributes={}) as writer:
        writer.step(step(1, consumed_tokens=300, time_s=2.0, reward_mean=0.0, skipped=False, version_after=1))
        writer.step(step(2, consumed_tokens=500, time_s=4.0, reward_mean=1.0, skipped=True, version_after=1))
        rows = {"fate": ["consumed", "consumed", "excluded"], "head_lag": [1, 2, 7], "outcome": ["wrong"] * 3}
        writer.trajectories(made_up(TRAJECTORIES, 0, 3) | rows)
    summary = RunLog(path).summary()
    assert (summary["steps"], summary["skipped_steps"], summary["version"], summary["head_lag_max"]) == (2, 1, 1, 2)
    assert summary["consumed_tokens_per_s"] == 200.0 and summary["reward_last_10_steps"] == 0.5
    assert summary["fates"]["consumed"] == 2 and summary["outcomes"]["wrong"] == 3


# ------------------------------------------------------------------------------------------------------------ schema
def test_every_column_is_documented_in_the_schema_and_in_the_file(path):
    RunLogWriter(path, attributes={}, tokens=True).close()
    document = logschema.markdown()
    with h5py.File(path, "r") as file:
        for table in logschema.TABLES + logschema.TOKEN_TABLES:
            assert table.doc and file[table.name].attrs["doc"] == table.doc
            assert list(file[table.name]) == [column.name for column in table.columns]
            for column in table.columns:
                dataset = file[table.name][column.name]
                assert column.unit and dataset.attrs["unit"] == column.unit
                assert column.doc and dataset.attrs["doc"] == column.doc
                assert tuple(dataset.attrs.get("labels", ())) == column.labels
                assert f"| {column.name} | {column.dtype} | {column.unit} | {column.doc}" in document
        assert file["num_rows"].attrs["tables"].tolist() == [t.name for t in logschema.TABLES + logschema.TOKEN_TABLES]


def test_units_and_meanings_come_with_the_table(finished):
    frame = RunLog(finished).steps
    assert frame.attrs["units"]["total_s"] == "s"
    assert set(frame.attrs["docs"]) == set(frame.columns)


@pytest.mark.parametrize("code", Code.__subclasses__(), ids=lambda c: c.__name__)
def test_codes_are_gapless_and_their_labels_lead_back(code):
    assert [int(member) for member in sorted(code)] == list(range(len(code)))
    assert [code.of(label) for label in code.labels()] == sorted(code)
    assert len(code) <= 256


def test_the_order_of_codes_is_part_of_the_file_format():
    assert Finish.labels() == ("eos", "length", "stop")
    assert Outcome.labels() == ("correct", "wrong", "unparsed", "timeout", "error", "truncated")
    assert Fate.labels() == ("consumed", "filtered", "excluded", "leftover", "dropped")


def test_loss_terms_are_what_the_loss_reports():
    losses = pytest.importorskip("areal_hpc.losses", reason="needs torch")
    torch = pytest.importorskip("torch")
    vector = torch.ones(len(losses.SUMS) + len(losses.MAXIMA), dtype=torch.float64)
    figures = losses.LossStats.from_vector(vector).finish()
    assert set(figures) - {"num_tokens"} == {column.name for column in logschema.LOSS_TERMS}


def test_reading_a_log_loads_nothing_of_the_training_side(finished):
    code = """
import sys
from areal_hpc.runlog import RunLog
RunLog(sys.argv[1]).summary()
print(sorted({"torch", "mpi4py", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, str(finished)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_writing_a_log_does_not_load_pandas():
    code = "import sys, areal_hpc.runlog_writer; print('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
