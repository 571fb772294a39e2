"""Why a call ran eager: each reason code and what it means, defined here and nowhere else."""

from enum import Enum


class Reason(str, Enum):
    """A reason code: equal to its text (`Reason.OFFLOAD == "offload"`), with its `meaning` in one line."""

    _value_: str
    meaning: str

    def __new__(cls, code: str, meaning: str) -> "Reason":
        reason = str.__new__(cls, code)
        reason._value_ = code
        reason.meaning = meaning
        return reason

    def __str__(self) -> str:
        return self._value_

    UNSEEN_SIGNATURE = "unseen_signature", "nothing is recorded for this signature (yet, or by choice of `capture`)"
    CAPTURE_FAILED = "capture_failed", "recording this signature was tried and failed"
    WARM_UP = "warm_up", "start-up's own eager call, which a recording needs before it"
    PROMPT_TOO_LONG = (
        "prompt_too_long",
        "the prompt is longer than the largest of `prompt_buckets`, and nothing is recorded for its exact length",
    )
    WEIGHTS_CHANGED = "weights_changed", "a parameter, a buffer or the module tree is no longer the one recorded"
    ADAPTER_CHANGED = "adapter_changed", "a LoRA or IP-adapter was loaded, switched, scaled, fused or removed"
    PROCESSORS_CHANGED = "processors_changed", "attention processors or the attention backend were changed"
    ATTRIBUTES_CHANGED = (
        "attributes_changed",
        "a plain attribute of a module, or of an object that a module owns, was changed",
    )
    HOOKS_CHANGED = "hooks_changed", "hooks were added or removed"
    OFFLOAD = "offload", "offloading moves the weights around each forward, so no address lasts"
    STEP_CACHE = "step_cache", "a step cache decides at each step what to compute"
    LAYERWISE_CASTING = "layerwise_casting", "layerwise casting re-allocates the weights around each forward"
    TRAINING = "training", "the denoiser is in training mode"
    GRAD_ENABLED = "grad_enabled", "gradients are being recorded"
    TRAINABLE_CHANGED = "trainable_changed", "`requires_grad` of a parameter was changed"
    OPTIMIZER_CHANGED = (
        "optimizer_changed",
        "an optimizer, one of its settings or its state was replaced",
    )
    IN_FLIGHT = "in_flight", "too many recorded forwards wait for their backwards"
    HOST_VALUE_CHANGED = "host_value_changed", "a value that the host reads fits no recording of this signature"
    SIDE_EFFECTS = "side_effects", "the forward changes state that a replay would not change"
    CPU_INPUT = "cpu_input", "an input tensor lies on the CPU while the denoiser is on another device"
    UNSUPPORTED_INPUT = "unsupported_input", "an argument is of a kind that cannot be part of a signature"
    OUT_OF_MEMORY = "out_of_memory", "memory ran out, or `memory_limit` leaves no room for this signature"
    EVICTED = "evicted", "the recording made room for others (`max_graphs`, `memory_limit`)"
    NOT_FASTER = "not_faster", "the replay was measured to be no faster than eager"
    VERIFY_FAILED = "verify_failed", "the first replay differed from eager"
    NESTED_CAPTURE = "nested_capture", "somebody else's capture is open"
    MULTI_DEVICE = "multi_device", "the denoiser is spread over several devices in a way that is not recorded"
    OTHER_RANK = "other_rank", "another rank could not take this route, and all take one"
    ALLOCATOR = "allocator", "CUDA memory comes from another allocator than PyTorch's own, whose graphs can have a pool"
    PAUSED = "paused", "the call was made under `diffgraph.paused`"


class Refused(Exception):
    """This call cannot take the recorded route; `reason` says why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
