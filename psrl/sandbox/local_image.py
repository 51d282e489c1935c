"""A container image out of this machine's own files: a small system with Python, git and `sandbox.packages`, without any registry.

Its tag is the digest of the list of its content (paths, sizes, times), so it is made once and found again until something of it
changes. Nothing of it is downloaded and nothing is run to make it but `ldd`.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from psrl.errors import SandboxUnavailableError
from psrl.sandbox.packages import PACKAGES_FOLDER, PROGRAMS_FOLDER, packages_of

if TYPE_CHECKING:
    from docker import APIClient

REPOSITORY = "psrl-local"
COMMAND_LINES = (
    "[ arch awk base32 base64 basename bash bunzip2 bzip2 cat chgrp chmod chown cksum cmp comm cp csplit cut dash date dd df diff diff3",
    "dir dirname du echo ed egrep env expand expr factor false fgrep file find fmt fold free getopt git grep gunzip gzip head hostid",
    "hostname id install join kill less link ln logname ls make mkdir mkfifo mknod mktemp mv nice nl nohup nproc numfmt od paste patch",
    "pathchk pgrep pkill pr printenv printf ps ptx pwd readlink realpath rev rm rmdir sdiff sed seq setsid sh sha1sum sha256sum shred shuf",
    "sleep sort split stat stty sum sync tac tail tar tee test timeout top touch tr tree true truncate tsort tty uname unexpand uniq",
    "unlink unxz uptime vdir vim.tiny wc which who whoami xargs xz yes zcat",
)
COMMANDS = frozenset(" ".join(COMMAND_LINES).split())
NEEDED = ("sh", "bash", "cat", "git", "ls", "tar")
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "idle_test"}
ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = {
    "etc/passwd": "root:x:0:0:root:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/tmp:/bin/bash\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
MAX_SCRIPT_BYTES = 100_000
IMPORT_CHANGES = ["ENV PATH=/opt/psrl/bin:/usr/bin:/bin", 'CMD ["/bin/bash"]']
LIBRARIES_LIST = "/etc/ld.so.cache"
ELF = b"\x7fELF"
LDD_WITHIN_S = 60.0
LOCK_WITHIN_S = 300.0
"""Making the image takes seconds; on a machine whose cores and disk are all busy it may take minutes."""
LOOK_AGAIN_S = 0.1


class ImageContent:
    """Paths inside (relative to the root), each from a file of this machine, a link or a text."""

    def __init__(self) -> None:
        """Nothing is in it yet."""
        self.files: dict[str, Path] = {}
        self.links: dict[str, str] = {}
        self.texts: dict[str, tuple[str, int]] = {}
        """Content and mode."""

    def add(self, path: Path) -> None:
        """A file at its own path; links on the way are kept as links."""
        parent = path.parent.resolve()
        target = parent / path.name
        inside = str(target).lstrip("/")
        if inside in self.files or inside in self.links:
            return
        if target.is_symlink():
            self.links[inside] = os.readlink(target)
            pointed = parent / os.readlink(target)
            if pointed.exists():
                self.add(pointed)
        elif target.is_file():
            self.files[inside] = target

    def add_tree(self, folder: Path, *, inside: str | None = None, skip: Callable[[str], bool] = lambda name: False) -> None:
        """Every file below `folder`, at its own path or below `inside`."""
        for current, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not skip(name))
            for name in sorted(names):
                path = Path(current) / name
                if skip(name) or not path.is_file():
                    continue
                if inside is None:
                    self.add(path)
                else:
                    self.files[f"{inside.lstrip('/')}/{path.relative_to(folder)}"] = path

    def digest(self) -> str:
        """Of the list of content; two machines with the same files at the same times have the same."""
        lines = [f"link {inside} {target}" for inside, target in self.links.items()]
        lines += [f"text {inside} {mode} {text}" for inside, (text, mode) in self.texts.items()]
        for inside, path in self.files.items():
            stat = path.stat()
            lines.append(f"file {inside} {stat.st_mode & 0o111} {stat.st_size} {int(stat.st_mtime)}")
        return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()

    def write(self, archive: tarfile.TarFile) -> None:
        """All of it, folders first, owned by root and readable by all."""
        folders = {str(folder) for inside in (*self.files, *self.links, *self.texts) for folder in Path(inside).parents} - {"."}
        for folder in sorted(folders | {"tmp", "root", "var/tmp"} - set(self.links)):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755
            archive.addfile(member)
        for inside, target in sorted(self.links.items()):
            member = tarfile.TarInfo(inside)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
        for inside, (text, mode) in sorted(self.texts.items()):
            content = text.encode()
            member = tarfile.TarInfo(inside)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
        for inside, path in sorted(self.files.items()):
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                member = tarfile.TarInfo(inside)
                # Compiled modules are valid for one time of their source, in whole seconds.
                member.size, member.mode, member.mtime = stat.st_size, 0o755 if stat.st_mode & 0o111 else 0o644, int(stat.st_mtime)
                archive.addfile(member, file)


def local_image(client: APIClient, packages: Sequence[str], *, tell: Callable[[str], None]) -> str:
    """The image's name; made if the Engine does not have it. Blocks for seconds then: for a thread.

    Raises:
        SandboxUnavailableError: A command that it needs is missing on this machine.
        ConfigError: `packages` names what is not installed.
    """
    import docker.errors

    content = system_content(packages)
    tag = content.digest()[:16]
    name = f"{REPOSITORY}:{tag}"
    with made_by_one_at_a_time():
        try:
            client.inspect_image(name)
            return name
        except docker.errors.ImageNotFound:
            pass
        began = time.perf_counter()
        add_libraries(content)
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
                content.write(archive)
            size = file.tell()
            file.seek(0)
            client.import_image_from_stream(iter(lambda: file.read(1 << 20), b""), repository=REPOSITORY, tag=tag, changes=IMPORT_CHANGES)
        num_files = len(content.files)
        tell(f"image {name} made from this machine's files: {num_files} files, {size / 1e6:.0f} MB, {time.perf_counter() - began:.1f} s")
    return name


@contextmanager
def made_by_one_at_a_time(within_s: float = LOCK_WITHIN_S) -> Iterator[None]:
    """Workers of one user and machine make the image once.

    Raises:
        SandboxUnavailableError: Somebody else holds the lock for longer, or its file is not this user's.
    """
    path = lock_path()
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SandboxUnavailableError(f"the lock of the local image cannot be opened ({error}). Fix: remove {path}") from error
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise SandboxUnavailableError(f"the lock of the local image, {path}, is another user's. Fix: remove it")
        deadline = time.monotonic() + within_s
        while not _is_locked(lock):
            if time.monotonic() >= deadline:
                words = f"another process has held {path} for {within_s:g} s, while it makes the local image"
                raise SandboxUnavailableError(f"{words}. Fix: end it (`fuser {path}`), or set sandbox.image")
            time.sleep(LOOK_AGAIN_S)
        yield
    finally:
        os.close(lock)


def lock_path() -> Path:
    """In the folder that the system keeps for this user, where it keeps one."""
    own = Path(f"/run/user/{os.geteuid()}")
    return (own if os.access(own, os.W_OK) else Path(tempfile.gettempdir())) / f"psrl-local-image-{os.geteuid()}.lock"


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def system_content(packages: Sequence[str]) -> ImageContent:
    """What goes into the image, but for the libraries; their list, which is in it, changes when one is replaced."""
    content = ImageContent()
    for link in ROOT_LINKS:
        if os.path.islink(f"/{link}"):
            content.links[link] = os.readlink(f"/{link}")
    for command in sorted(COMMANDS):
        found = shutil.which(command, path="/usr/bin:/bin:/usr/local/bin")
        if found is not None:
            content.add(Path(found))
        elif command in NEEDED:
            raise SandboxUnavailableError(
                f"the local image needs {command}, which this machine lacks. Fix: install it, or set sandbox.image"
            )
    git_core = Path("/usr/lib/git-core")
    for path in sorted(git_core.iterdir()) if git_core.is_dir() else ():
        # The commands are in `git` itself; what is beside it are scripts, and programs for the network.
        if path.is_file() and not path.is_symlink() and path.stat().st_size < MAX_SCRIPT_BYTES and not _is_elf(path):
            content.add(path)
    for folder in ("/usr/share/git-core/templates", "/usr/lib/locale/C.utf8"):
        content.add_tree(Path(folder))
    content.texts |= {inside: (text, 0o644) for inside, text in ETC.items()}
    _add_python(content)
    _add_packages(content, packages)
    if os.path.exists(LIBRARIES_LIST):
        content.add(Path(LIBRARIES_LIST))
    return content


def _add_python(content: ImageContent) -> None:
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    content.add(python)
    tag = f".{sys.implementation.cache_tag}.pyc"

    def is_left_out(name: str) -> bool:
        is_foreign = name.endswith((".a", ".exe")) or (name.endswith(".pyc") and not name.endswith(tag))
        return is_foreign or name in NOT_IN_STDLIB or name.startswith(("config-", "_test", "_tkinter"))

    for folder in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_prefix})}:
        content.add_tree(Path(folder), skip=is_left_out)
    for name in ("python", "python3"):
        content.links[f"{PROGRAMS_FOLDER.lstrip('/')}/{name}"] = str(python.parent.resolve() / python.name)


def _add_packages(content: ImageContent, names: Sequence[str]) -> None:
    packages = packages_of(names)
    tag = f".{sys.implementation.cache_tag}.pyc"
    for name, path in packages.entries:
        inside = f"{PACKAGES_FOLDER}/{name}"
        if path.is_dir():
            content.add_tree(path, inside=inside, skip=lambda each: each.endswith(".pyc") and not each.endswith(tag))
        else:
            content.files[inside.lstrip("/")] = path
    for name, text in packages.programs:
        content.texts[f"{PROGRAMS_FOLDER.lstrip('/')}/{name}"] = (text, 0o755)


def add_libraries(content: ImageContent) -> None:
    """What the programs load, by the answer of `ldd`. SandboxUnavailableError: it gives none."""
    binaries = [str(path) for path in content.files.values() if _is_elf(path)]
    try:
        done = subprocess.run(["ldd", *binaries], capture_output=True, text=True, timeout=LDD_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        cause = f"gave no answer within {LDD_WITHIN_S:g} s" if isinstance(error, subprocess.TimeoutExpired) else f"cannot be run ({error})"
        raise SandboxUnavailableError(f"the local image needs `ldd`, which {cause}. Fix: try it by hand, or set sandbox.image") from error
    for line in set(done.stdout.splitlines()):
        words = line.split()
        found = next((word for word in words if word.startswith("/") and not word.endswith(":")), None)
        if found is not None:
            content.add(Path(found))


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == ELF
