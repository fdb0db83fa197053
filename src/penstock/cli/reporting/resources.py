"""What a row of a trace stands for, as traces and plans call it."""

from collections.abc import Mapping

COMPUTE, WAITING = "compute", "waiting"
RESOURCES: Mapping[str, str] = {
    COMPUTE: "device compute",
    "upload": "host-to-device link",
    "download": "device-to-host link",
    "collective": "links between ranks",
    "model collective": "links within the model",
    "update": "host update",
    "device update": "device update",
    "read": "NVMe reads",
    "fetch": "NVMe reads",
    "write": "NVMe writes",
    "save": "copies for a checkpoint",
}
OUTSIDE = "what is not traced (data, loss, Python)"
TIERS = ("device", "cpu", "nvme")
