"""A conversion that is killed or finds its disk full goes on where it was, and none begins without room."""

from pathlib import Path

from decode_daemon.engine.fused import read_record, room
from tests.kit.converting import FILES, contents, convert, script


def test_a_run_that_is_killed_at_any_byte_is_taken_up_by_the_next(source: Path, tmp_path: Path) -> None:
    """The kernel kills at the first byte beyond a file size limit, which is raised from run to run."""
    wanted, target = tmp_path / "wanted", tmp_path / "fused"
    convert(source, wanted)
    sizes = {path.stat().st_size for path in wanted.iterdir()}
    limits = sorted(size - less for size in sizes for less in (1, 1000) if size > 1500)
    steps = script(
        """
        for limit in [0, 1, 100, 500, *map(int, sys.argv[3:])]:
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                convert()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ, (limit, status)
            print(len(list(target.glob("fused-*.safetensors"))))
        """,
        source,
        target,
        *limits,
    )
    assert steps[0] == "0"
    assert steps[-1] not in ("0", str(FILES))
    assert steps == sorted(steps)
    assert not read_record(target).complete
    convert(source, target)
    assert contents(target) == contents(wanted)


def test_a_disk_that_is_full_ends_the_run_by_name_and_keeps_what_is_complete(source: Path, tmp_path: Path) -> None:
    """A file system without inodes is full before its bytes are; when it gets some, the same command goes on."""
    told, kept, after = script(
        """
        target.mkdir()
        assert os.system(f"mount -t tmpfs -o size=80m,nr_inodes=8 tmpfs {target}") == 0
        try:
            convert()
        except ConvertError as error:
            print(error)
        kept = {path.name: path.stat().st_ino for path in target.glob("fused-*.safetensors")}
        print(sorted(kept), list(target.glob(".*")))
        assert os.system(f"mount -o remount,nr_inodes=100 {target}") == 0
        convert()
        after = {path.name: path.stat().st_ino for path in target.glob("fused-*.safetensors")}
        print(len(after), after.items() >= kept.items())
        """,
        source,
        tmp_path / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert told.startswith(str(tmp_path / "fused"))
    assert "No space left on device. What is complete is kept" in told
    assert kept == "['fused-embedding.safetensors', 'fused-head.safetensors'] []"
    assert after == f"{FILES} True"


def test_a_disk_without_room_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    told, left = script(
        """
        target.parent.mkdir()
        assert os.system(f"mount -t tmpfs -o size=1m tmpfs {target.parent}") == 0
        try:
            convert()
        except ConvertError as error:
            print(error)
        print(list(target.parent.iterdir()))
        """,
        source,
        tmp_path / "disk" / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert f"the fused form needs 0.07 GB in {tmp_path / 'disk' / 'fused'}, where 0.00 GB are free: make room" in told
    assert left == "[]"


def test_only_what_is_still_to_be_written_needs_room(source: Path, tmp_path: Path) -> None:
    fits = script(
        """
        target.mkdir()
        assert os.system(f"mount -t tmpfs -o size=80m tmpfs {target}") == 0
        convert()
        free, spare = os.statvfs(target).f_bavail * os.statvfs(target).f_bsize, (64 << 20) + 20_000
        (target / ".anchorleg-filler").write_bytes(bytes(free - spare))
        (target / "fused-head.safetensors").unlink()
        convert()
        print(spare > sum(path.stat().st_size for path in target.glob("fused-*")) + (64 << 20))
        """,
        source,
        tmp_path / "fused",
        inside=("unshare", "--mount", "--map-root-user"),
    )
    assert fits == ["False"]


def test_what_replaces_another_file_needs_room_beside_it(tmp_path: Path) -> None:
    for name, size in {"smaller": 10, "same": 50, "larger": 100}.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert room(tmp_path, {"new": 500}) == 500
    assert room(tmp_path, {"same": 50}) == 50
    assert room(tmp_path, {"new": 500, "smaller": 50, "same": 50, "larger": 60}) == 500 + 40 + 60
