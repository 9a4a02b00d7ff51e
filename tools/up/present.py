"""What flags of `warmroute up` name has to be there: told before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

from tools.errors import CommandError

GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
"""One of these is where a driver is: NVIDIA's, also of small boards, AMD's, and Windows' for Linux
within it."""

KNOCK_S = 2.0


def require_kvd(path: Path) -> None:
    """Raises CommandError where nobody listens at the socket."""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(KNOCK_S)
        try:
            knock.connect(str(path))
        except OSError as error:
            raise CommandError(
                f"--kv-host: no kvd listens at {path} ({error.strerror or error}): start it first "
                "(`python -m kvstore.kvd --config FILE`), or leave it to --kv-host auto"
            ) from None


def require_device(device: str) -> None:
    """Raises CommandError where this machine has no driver for it."""
    if device != "cpu" and not any(map(Path.exists, map(Path, GPU_FILES))):
        raise CommandError(f"--device {device}: this machine has no GPU driver ({GPU_FILES[0]})")
