"""Model FLOPs utilisation, and the peaks that it is measured against."""

# Dense bfloat16 peak of the SXM parts, by a part of the device name; other form factors differ.
PEAK_BF16_FLOPS = (("H100", 989e12), ("H200", 989e12))
OTHER_FORM_FACTORS = ("PCIe", "NVL")


def peak_bf16_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOPs per second of one device; None where it is not known (a CPU)."""
    if any(part in device_name for part in OTHER_FORM_FACTORS):
        return None
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in device_name), None)


def mfu(
    tokens_per_second: float,
    *,
    flops_per_token: float,
    peak_flops: float | None,
    num_devices: int,
) -> float | None:
    """The share of the devices' peak that the model's own arithmetic reaches; None without one."""
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (peak_flops * num_devices)
