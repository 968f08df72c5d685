"""Write clips and contact sheets, and say how far two clips are apart."""

from __future__ import annotations

import math
import os
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import MissingDependencyError

INSTALL_HINT = 'pip install "solspark[cli]"'


class OutputFolder:
    """Collect files under temporary names and give them their real names all at once.

    Use as a context manager: write to `path(name)`, then call `commit()`. Leaving the context
    without it, by an error or an interrupt, removes everything written, so that no half file
    stays and files of an earlier run are untouched.

    Args:
        folder: where the files go; made, with its parents, if missing.

    Raises:
        NotADirectoryError: `folder` is a file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._pending: dict[str, Path] = {}

    def __enter__(self) -> OutputFolder:
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"out: expected a folder, got the file {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def path(self, name: str) -> Path:
        """Return the temporary path to write `name` to: same folder, same suffix, hidden."""
        # The suffix stays because encoders choose a container by it.
        pending = self.folder / f".{Path(name).stem}.{os.getpid()}.partial{Path(name).suffix}"
        self._pending[name] = pending
        return pending

    def commit(self) -> list[Path]:
        """Give every file its real name; returns the final paths in the order of `path` calls."""
        final = []
        for name, pending in list(self._pending.items()):
            os.replace(pending, self.folder / name)
            del self._pending[name]
            final.append(self.folder / name)
        return final

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pending in self._pending.values():
            pending.unlink(missing_ok=True)
        self._pending.clear()


def require_writers() -> None:
    """Raise MissingDependencyError unless clips and contact sheets can be written here."""
    _require("imageio_ffmpeg", "writing a clip")
    _require("PIL", "writing a contact sheet")


def write_clip(
    path: str | os.PathLike[str],
    frames: Tensor,
    fps: float,
    audio: Tensor | None = None,
    sampling_rate: int | None = None,
) -> None:
    """Write an H.264 .mp4, with an AAC soundtrack when there is audio.

    Args:
        path: ends with .mp4.
        frames: uint8 [F, H, W, 3], RGB.
        fps: frames a second.
        audio: float [channels, samples] in -1..1, or None for a silent clip.
        sampling_rate: Hz, needed with audio.

    Raises:
        ValueError: frames are not uint8 [F, H, W, 3], or audio comes without its rate.
        MissingDependencyError: imageio-ffmpeg is not installed.
    """
    _check_frames(frames)
    if audio is not None and not sampling_rate:
        raise ValueError("sampling_rate: expected Hz together with audio, got None")
    writer = _require("imageio_ffmpeg", "writing a clip")
    with tempfile.TemporaryDirectory() as folder:
        sound: dict[str, Any] = {}
        if audio is not None and sampling_rate:
            sound_path = Path(folder) / "sound.wav"
            _write_wave(sound_path, audio, sampling_rate)
            sound = {"audio_path": str(sound_path), "audio_codec": "aac"}
        stream = writer.write_frames(
            os.fspath(path),
            (frames.shape[2], frames.shape[1]),
            fps=fps,
            quality=8,
            # Sizes are multiples of 32 in practice; 2 is what yuv420p needs, without a rescale.
            macro_block_size=2,
            ffmpeg_log_level="error",
            **sound,
        )
        stream.send(None)
        try:
            for frame in frames:
                stream.send(frame.contiguous().numpy())
        finally:
            stream.close()


def write_contact_sheet(
    path: str | os.PathLike[str],
    rows: Sequence[tuple[str, Tensor]],
    columns: int = 6,
) -> None:
    """Write a PNG with evenly spaced frames of several clips, one clip a row.

    Two rows or more get one row a further clip that shows its difference from the first, eight
    times amplified around mid grey.

    Args:
        path: ends with .png.
        rows: (label, uint8 frames [F, H, W, 3]) pairs of equal shape.
        columns: frames a row; fewer when the clip is shorter. Frames wider than 320 pixels are
            shown smaller.

    Raises:
        ValueError: no row, or rows of different shapes.
        MissingDependencyError: Pillow is not installed.
    """
    if not rows:
        raise ValueError("rows: expected at least one clip, got none")
    for _, frames in rows:
        _check_frames(frames)
        if frames.shape != rows[0][1].shape:
            raise ValueError(
                f"rows: expected clips of one shape {tuple(rows[0][1].shape)}, "
                f"got {tuple(frames.shape)}"
            )
    _require("PIL", "writing a contact sheet")
    from PIL import Image, ImageDraw, ImageFont

    count, height, width, _ = rows[0][1].shape
    scale = min(1.0, 320 / width)
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    columns = min(columns, count)
    picked = torch.linspace(0, count - 1, columns).round().long()
    shown = [(label, frames[picked]) for label, frames in rows]
    first = shown[0]
    for label, frames in shown[1:]:
        difference = (frames.int() - first[1].int()) * 8 + 128
        shown.append((f"{label} - {first[0]} (x8)", difference.clamp(0, 255).to(torch.uint8)))

    margin, caption = 4, 18
    sheet = Image.new(
        "RGB",
        (columns * (width + margin) + margin, len(shown) * (height + margin + caption) + margin),
        (24, 24, 24),
    )
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    for row, (label, frames) in enumerate(shown):
        top = margin + row * (height + margin + caption)
        draw.text((margin, top), label, fill=(230, 230, 230), font=font)
        for column in range(columns):
            left = margin + column * (width + margin)
            image = Image.fromarray(frames[column].contiguous().numpy())
            if scale < 1:
                image = image.resize((width, height), Image.Resampling.LANCZOS)
            sheet.paste(image, (left, top + caption))
            draw.text(
                (left + 2, top + caption + 1),
                str(int(picked[column])),
                fill=(255, 255, 255),
                stroke_fill=(0, 0, 0),
                stroke_width=1,
                font=font,
            )
    sheet.save(os.fspath(path))


def psnr(frames: Tensor, reference: Tensor) -> float:
    """Return the peak signal-to-noise ratio of two clips in dB.

    10 log10(255^2 / mean squared error), the mean over all frames, pixels and channels together.

    Args:
        frames, reference: uint8 [F, H, W, 3].

    Returns:
        dB; infinity for equal clips.

    Numerics: float64.
    """
    _check_pair(frames, reference)
    error = (frames.double() - reference.double()).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ssim(frames: Tensor, reference: Tensor) -> float:
    """Return the structural similarity of two clips, mean over frames and channels.

    Gaussian window 11 x 11 with sigma 1.5, K1 = 0.01, K2 = 0.03, no padding: the window of the
    original definition and of the figures published for Sol and Spark.

    Args:
        frames, reference: uint8 [F, H, W, 3], H and W at least 11.

    Returns:
        A number up to 1, 1 for equal clips.

    Raises:
        ValueError: frames smaller than the window.

    Numerics: float32, one frame at a time.

    Source: Wang et al., Image quality assessment, 2004; spec/spark.md section 8.
    """
    _check_pair(frames, reference)
    if min(frames.shape[1:3]) < 11:
        raise ValueError(
            f"frames: expected at least 11 x 11 pixels for SSIM, got {tuple(frames.shape[1:3])}"
        )
    offsets = torch.arange(11, dtype=torch.float32) - 5
    window = torch.exp(-offsets.square() / (2 * 1.5**2))
    window = window / window.sum()

    def blur(image: Tensor) -> Tensor:
        rows = functional.conv2d(image, window.view(1, 1, 11, 1))
        return functional.conv2d(rows, window.view(1, 1, 1, 11))

    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    total = 0.0
    for frame, other in zip(frames, reference, strict=True):
        x = frame.permute(2, 0, 1).float()[:, None]
        y = other.permute(2, 0, 1).float()[:, None]
        mean_x, mean_y = blur(x), blur(y)
        var_x = blur(x * x) - mean_x.square()
        var_y = blur(y * y) - mean_y.square()
        covariance = blur(x * y) - mean_x * mean_y
        similarity = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
            (mean_x.square() + mean_y.square() + c1) * (var_x + var_y + c2)
        )
        total += similarity.mean().item()
    return total / frames.shape[0]


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||, in float64; 0 when both are zero."""
    if value.shape != reference.shape:
        raise ValueError(
            f"value: expected the shape of reference {tuple(reference.shape)}, "
            f"got {tuple(value.shape)}"
        )
    difference = (value.double() - reference.double()).norm().item()
    size = reference.double().norm().item()
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def _check_frames(frames: Tensor) -> None:
    """Refuse what is not uint8 [F, H, W, 3]."""
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(
            f"frames: expected uint8 [F, H, W, 3], got {frames.dtype} {tuple(frames.shape)}"
        )


def _check_pair(frames: Tensor, reference: Tensor) -> None:
    """Refuse clips that cannot be compared."""
    _check_frames(frames)
    _check_frames(reference)
    if frames.shape != reference.shape:
        raise ValueError(
            f"frames: expected the shape of reference {tuple(reference.shape)}, "
            f"got {tuple(frames.shape)}"
        )


def _write_wave(path: Path, audio: Tensor, sampling_rate: int) -> None:
    """Write 16-bit PCM."""
    samples = (audio.float().nan_to_num().clamp(-1, 1) * 32767).round().to(torch.int16)
    with wave.open(str(path), "wb") as sound:
        sound.setnchannels(samples.shape[0])
        sound.setsampwidth(2)
        sound.setframerate(sampling_rate)
        # A wave file interleaves its channels.
        sound.writeframes(samples.t().contiguous().numpy().tobytes())


def _require(module: str, purpose: str) -> Any:
    """Import an optional module, or say what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f"{purpose} needs {module}: {INSTALL_HINT}") from error
