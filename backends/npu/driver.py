"""Queries the NPU through CANN's library. Loads no tensor library."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

LIBRARY = "libascendcl.so"
_STARTED_BEFORE = 100002  # ACL_ERROR_REPEAT_INITIALIZE
_DEVICE_MEMORY = 1  # ACL_HBM_MEM
_CANN = 0  # ACL_PKG_NAME_CANN
_VERSION_BYTES = 512  # aclCANNPackageVersion, which begins with the text


class DriverFailed(Exception):
    """CANN or the NPU is missing. The message is shown to the user."""


class Npu(NamedTuple):
    """The first NPU of the machine."""

    name: str  # of the chip, e.g. Ascend910B2
    number: int  # of NPUs in this machine
    memory: int  # bytes
    free: int  # bytes of free memory
    cann: str  # the version of CANN; "unknown" before 8.1


def first() -> Npu:
    """The first NPU. Raises DriverFailed if CANN or the NPU does not start."""
    try:
        acl = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverFailed(f"CANN is missing: install it, and run its set_env.sh ({error})") from None
    acl.aclrtGetSocName.restype = ctypes.c_char_p
    status = acl.aclInit(None)
    if status not in (0, _STARTED_BEFORE):
        raise DriverFailed(f"CANN does not start (aclInit gave error {status})")
    count = ctypes.c_uint32()
    _check(acl.aclrtGetDeviceCount(ctypes.byref(count)), "the driver shows no NPU")
    _check(acl.aclrtSetDevice(0), "the first NPU does not start")
    try:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check(acl.aclrtGetMemInfo(_DEVICE_MEMORY, ctypes.byref(free), ctypes.byref(total)), "no memory of the NPU")
        name = (acl.aclrtGetSocName() or b"").decode()
        return Npu(name, count.value, total.value, free.value, cann_version(acl))
    finally:
        acl.aclrtResetDevice(0)


def cann_version(acl: Any) -> str:
    """`acl`: CANN's library."""
    version = ctypes.create_string_buffer(_VERSION_BYTES)
    has_version = hasattr(acl, "aclsysGetCANNVersion") and not acl.aclsysGetCANNVersion(_CANN, version)
    return version.value.decode() if has_version else "unknown"


def _check(status: int, failure: str) -> None:
    if status:
        raise DriverFailed(f"{failure} (error {status})")
