"""Open what a MiniMax-H3 request conditions on: keyframes (fl2va) and references (ref2va)."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingDependencyError
from .h3_pipeline import require_modular_pipeline

REFERENCE_LIMITS = {"image": 9, "video": 3, "audio": 3}
"""References of a kind that one request may carry; 12 in all, and never audio alone."""

SUFFIXES = {
    "image": ("png", "jpg", "jpeg", "webp", "bmp", "tif", "tiff", "gif", "avif"),
    "video": ("mp4", "m4v", "mov", "mkv", "webm", "avi"),
    "audio": ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "aif", "aiff"),
}
"""What tells the kind of a file; a system's own table of types differs between machines."""

FPS = 24
LONGEST_CLIP = 15.1
"""Seconds; what a reference has beyond the longest clip is not read."""

AUDIO_RATE = 32_000
"""Hz, the rate of H3's audio autoencoder."""

INSTALL_HINT = 'pip install "solspark[cli]"'


def workflow_of(first_frame: str | None, last_frame: str | None, references: Sequence[str]) -> str:
    """Return "t2va", "fl2va" or "ref2va", as the media of a request ask for.

    Raises:
        ValueError: keyframes together with references, or references that no request may carry.
    """
    if not references:
        return "t2va" if first_frame is None and last_frame is None else "fl2va"
    for name, path in (("first_frame", first_frame), ("last_frame", last_frame)):
        if path is not None:
            raise ValueError(
                f"{name}: expected None together with references, got {path!r}: a request is "
                "fl2va or ref2va"
            )
    kinds = [reference_kind(path) for path in references]
    for kind, most in REFERENCE_LIMITS.items():
        if kinds.count(kind) > most:
            raise ValueError(
                f"reference: expected at most {most} of kind {kind}, got {kinds.count(kind)}"
            )
    if len(kinds) > 12:
        raise ValueError(f"reference: expected at most 12, got {len(kinds)}")
    if set(kinds) == {"audio"}:
        raise ValueError("reference: expected an image or a video beside audio, got audio alone")
    return "ref2va"


def reference_kind(path: str) -> str:
    """Return "image", "video" or "audio", told by the suffix.

    Raises:
        ValueError: the suffix is none of theirs.
    """
    suffix = Path(path).suffix.lower().removeprefix(".")
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return kind
    known = ", ".join(each for suffixes in SUFFIXES.values() for each in suffixes)
    raise ValueError(
        f"reference: expected an image, a video or audio, told by its suffix ({known}), "
        f"got {path!r}"
    )


def open_media(
    first_frame: str | None, last_frame: str | None, references: Sequence[str]
) -> dict[str, Any]:
    """Read keyframes or references into what the pipeline takes of them.

    Args:
        first_frame, last_frame: image files, or None.
        references: files of images, videos (with their sound) and audio, in the order in which the
            model reads them.

    Returns:
        Inputs of `generate_clip`: `image` and `last_image` (PIL, RGB, upright), or `references`
        (diffusers' `MiniMaxH3ImageReference` and its siblings; videos at 24 frames a second, sound
        float32 [channels, samples] at 32,000 Hz). Empty for a prompt alone.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be read as what it is; the message names the argument.
        MissingDependencyError: Pillow, imageio-ffmpeg or diffusers is missing.
    """
    inputs: dict[str, Any] = {}
    for argument, path, keyword in (
        ("first_frame", first_frame, "image"),
        ("last_frame", last_frame, "last_image"),
    ):
        if path is not None:
            inputs[keyword] = _read_image(argument, path)
    if references:
        package = require_modular_pipeline()
        inputs["references"] = [_read_reference(package, path) for path in references]
    return inputs


def _read_reference(package: Any, path: str) -> Any:
    """Read one reference; `package` is diffusers' H3 package, which has a class for each kind."""
    kind = reference_kind(path)
    if kind == "image":
        image = _read_image("reference", path)
        _check_shape(path, *image.size)
        return package.MiniMaxH3ImageReference(image=image)
    sound = _read_sound(path)
    if kind == "video":
        rate = None if sound is None else AUDIO_RATE
        frames = _read_frames(path)
        _check_shape(path, frames.shape[2], frames.shape[1])
        return package.MiniMaxH3VideoReference(
            frames=frames, fps=float(FPS), audio=sound, sample_rate=rate
        )
    if sound is None:
        raise ValueError(f"reference: expected audio in {path}, got none")
    return package.MiniMaxH3AudioReference(audio=sound, sample_rate=AUDIO_RATE)


def _read_image(argument: str, path: str) -> Any:
    """Read an image: RGB, upright."""
    _check_file(argument, path)
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingDependencyError(f"reading an image needs PIL: {INSTALL_HINT}") from error
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except OSError as error:
        raise ValueError(f"{argument}: expected an image, got {path}: {error}") from error


def _read_frames(path: str) -> Any:
    """Read a video as a numpy uint8 [F, H, W, 3] at 24 frames a second."""
    import numpy as np

    # A PPM says its own size, so that a stream of them needs no probe of the rotated source.
    output = ["-map", "0:v:0", "-vf", f"fps={FPS}", "-c:v", "ppm", "-f", "image2pipe", "-"]
    stream, error = _decode(path, output)
    frames, place = [], 0
    while place < len(stream):
        end = place
        for _ in range(3):  # P6, width and height, 255: a line each
            end = stream.index(b"\n", end) + 1
        width, height = (int(word) for word in stream[place:end].split()[1:3])
        size = width * height * 3
        frames.append(np.frombuffer(stream, np.uint8, size, end).reshape(height, width, 3))
        place = end + size
    if not frames:
        raise ValueError(f"reference: expected a video, got {path}: {error}")
    return np.stack(frames)


def _read_sound(path: str) -> Tensor | None:
    """Read the first soundtrack as float32 [channels, samples] at 32,000 Hz; None without one."""
    import numpy as np

    # Sun audio says its number of channels; asking ffmpeg for two would turn mono down by 3 dB.
    output = ["-map", "0:a:0?", "-ar", str(AUDIO_RATE), "-c:a", "pcm_f32be", "-f", "au", "-"]
    stream, error = _decode(path, output)
    if not stream:
        if "does not contain any stream" in error:
            return None
        raise ValueError(f"reference: expected a video or audio, got {path}: {error}")
    start, channels = struct.unpack_from(">I12xI", stream, 4)
    if channels > 2:
        raise ValueError(f"reference: expected mono or stereo sound, got {channels} channels")
    samples = np.frombuffer(stream[start:], ">f4").astype(np.float32)
    return torch.from_numpy(samples.reshape(-1, channels).T.copy())


def _decode(path: str, output: list[str]) -> tuple[bytes, str]:
    """Run ffmpeg over a file; returns what it wrote, and its first complaint."""
    _check_file("reference", path)
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a video or audio needs imageio_ffmpeg: {INSTALL_HINT}"
        ) from error
    source = ["-v", "error", "-nostdin", "-t", str(LONGEST_CLIP), "-i", os.path.abspath(path)]
    done = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), *source, *output], capture_output=True, check=False
    )
    first = done.stderr.decode(errors="replace").strip().partition("\n")[0]
    # Without the part of ffmpeg that speaks: "[in#0 @ 0x55f1a2e77080] ".
    return done.stdout, first.rpartition("] ")[2] or "nothing to decode"


def _check_shape(path: str, width: int, height: int) -> None:
    """Refuse a reference of a shape that the model does not take."""
    if not height <= 4 * width <= 16 * height:
        raise ValueError(
            f"reference: expected a shape from 1:4 to 4:1, got {width} x {height} in {path}"
        )


def _check_file(argument: str, path: str) -> None:
    """Refuse a path that is no file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{argument}: expected a file, got {path!r}")
