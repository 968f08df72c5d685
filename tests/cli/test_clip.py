"""Clips on disk and the distances between clips."""

from __future__ import annotations

import math
import re
import subprocess

import pytest
import torch

from solspark.integrations import clip

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="the cli extra is not installed")
Image = pytest.importorskip("PIL.Image", reason="the cli extra is not installed")


@pytest.fixture
def frames() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (7, 32, 48, 3), dtype=torch.uint8, generator=generator)


def probe(path) -> str:
    """Return what ffmpeg says about a file."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    done = subprocess.run([ffmpeg, "-hide_banner", "-i", str(path)], capture_output=True, text=True)
    return done.stderr


def test_a_clip_has_its_size_rate_and_frames(tmp_path, frames):
    path = tmp_path / "clip.mp4"
    clip.write_clip(path, frames, fps=24)
    found = probe(path)
    assert re.search(r"Video: h264.*48x32.*24 fps", found), found
    assert "Audio" not in found
    count, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    assert count == 7


def test_a_clip_shows_the_frames_it_was_given(tmp_path):
    # Flat colours survive the codec within a few levels; a swap of channels or axes does not.
    colours = torch.tensor([[200, 30, 30], [30, 200, 30], [30, 30, 200]], dtype=torch.uint8)
    frames = colours[:, None, None, :].expand(3, 32, 64, 3).contiguous()
    frames[:, :, :32] = 128
    path = tmp_path / "clip.mp4"
    clip.write_clip(path, frames, fps=24)
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    decode = [ffmpeg, "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(decode, capture_output=True, check=True).stdout
    read = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 32, 64, 3)
    assert read.shape == frames.shape
    # Away from the edge between the halves, where chroma is stored at half the resolution.
    for columns in (slice(0, 24), slice(40, 64)):
        difference = (read[:, :, columns].int() - frames[:, :, columns].int()).abs().max()
        assert difference <= 12


def test_a_clip_carries_its_sound(tmp_path, frames):
    path = tmp_path / "clip.mp4"
    sound = torch.sin(torch.arange(8000) / 20)[None].repeat(2, 1)
    clip.write_clip(path, frames, 24, sound, 16000)
    assert re.search(r"Audio: aac.*16000 Hz, stereo", probe(path)), probe(path)
    with pytest.raises(ValueError, match="sampling_rate: expected Hz"):
        clip.write_clip(path, frames, 24, sound, None)


@pytest.mark.parametrize(
    "bad",
    [torch.zeros(2, 4, 4, 3), torch.zeros(4, 4, 3, dtype=torch.uint8), torch.zeros(0, 4, 4, 3)],
)
def test_frames_that_are_no_clip_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=r"frames: expected uint8 \[F, H, W, 3\], got"):
        clip.write_clip(tmp_path / "clip.mp4", bad, fps=24)
    assert list(tmp_path.iterdir()) == []


def test_a_contact_sheet_shows_each_clip_and_its_difference_from_the_first(tmp_path, frames):
    path = tmp_path / "sheet.png"
    brighter = (frames.int() + 10).clamp(max=255).to(torch.uint8)
    clip.write_contact_sheet(path, [("dense", frames), ("spark", brighter)], columns=3)
    with Image.open(path) as stored:
        sheet = stored.convert("RGB")
    assert sheet.size == (3 * (48 + 4) + 4, 3 * (32 + 4 + 18) + 4)

    def pixel(row: int, column: int, x: int, y: int) -> tuple[int, ...]:
        return sheet.getpixel((4 + column * 52 + x, 4 + row * 54 + 18 + y))

    # Below the frame number in the corner; columns are frames 0, 3 and 6.
    for column, frame in enumerate((0, 3, 6)):
        assert pixel(0, column, 40, 25) == tuple(frames[frame, 25, 40].tolist())
        assert pixel(1, column, 40, 25) == tuple(brighter[frame, 25, 40].tolist())
        step = brighter[frame, 25, 40].int() - frames[frame, 25, 40].int()
        assert pixel(2, column, 40, 25) == tuple((step * 8 + 128).clamp(0, 255).tolist())


def test_a_contact_sheet_shows_wide_frames_smaller(tmp_path):
    frames = torch.full((2, 96, 640, 3), 90, dtype=torch.uint8)
    clip.write_contact_sheet(tmp_path / "sheet.png", [("dense", frames)])
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (2 * (320 + 4) + 4, 48 + 4 + 18 + 4)
        assert sheet.getpixel((4 + 300, 4 + 18 + 40)) == (90, 90, 90)


def test_a_contact_sheet_refuses_clips_of_different_shapes(tmp_path, frames):
    with pytest.raises(ValueError, match="rows: expected clips of one shape"):
        clip.write_contact_sheet(tmp_path / "a.png", [("a", frames), ("b", frames[:3])])
    with pytest.raises(ValueError, match="rows: expected at least one clip"):
        clip.write_contact_sheet(tmp_path / "a.png", [])


def test_psnr_of_a_known_error():
    reference = torch.full((2, 16, 16, 3), 100, dtype=torch.uint8)
    # Every value off by 5: the mean squared error is 25.
    assert clip.psnr(reference + 5, reference) == pytest.approx(10 * math.log10(255**2 / 25))
    assert clip.psnr(reference, reference) == math.inf
    with pytest.raises(ValueError, match="frames: expected the shape of reference"):
        clip.psnr(reference[:1], reference)


def ssim_by_windows(x: torch.Tensor, y: torch.Tensor) -> float:
    """SSIM of one [H, W] plane, written as the sum over every 11 x 11 window that fits."""
    offsets = torch.arange(11, dtype=torch.float64) - 5
    line = torch.exp(-(offsets**2) / 4.5)
    window = line[:, None] * line[None, :]
    window /= window.sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    values = []
    for top in range(x.shape[0] - 10):
        for left in range(x.shape[1] - 10):
            a, b = (plane[top : top + 11, left : left + 11].double() for plane in (x, y))
            mean_a, mean_b = (window * a).sum(), (window * b).sum()
            var_a = (window * (a - mean_a) ** 2).sum()
            var_b = (window * (b - mean_b) ** 2).sum()
            both = (window * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + c1)
                * (2 * both + c2)
                / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
            )
    return torch.stack(values).mean().item()


def test_ssim_equals_its_definition():
    generator = torch.Generator().manual_seed(5)
    reference = torch.randint(0, 256, (2, 14, 17, 3), dtype=torch.uint8, generator=generator)
    noise = torch.randint(-30, 31, reference.shape, generator=generator)
    frames = (reference.int() + noise).clamp(0, 255).to(torch.uint8)
    expected = sum(
        ssim_by_windows(frames[f, :, :, c], reference[f, :, :, c])
        for f in range(2)
        for c in range(3)
    )
    # float32 against float64: a mean of values near 1 from sums of squares up to 255^2.
    assert clip.ssim(frames, reference) == pytest.approx(expected / 6, abs=2e-4)
    assert clip.ssim(reference, reference) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="at least 11 x 11 pixels"):
        clip.ssim(reference[:, :8], reference[:, :8])


def test_relative_l2():
    reference = torch.tensor([3.0, 4.0])
    assert clip.relative_l2(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert clip.relative_l2(reference, reference) == 0
    assert clip.relative_l2(torch.ones(2), torch.zeros(2)) == math.inf
    with pytest.raises(ValueError, match="value: expected the shape of reference"):
        clip.relative_l2(torch.ones(1, 2), reference)


def test_files_get_their_names_all_at_once(tmp_path):
    out = tmp_path / "a" / "b"
    with clip.OutputFolder(out) as folder:
        folder.path("report.json").write_text("{}")
        folder.path("clip.mp4").write_bytes(b"x")
        assert not (out / "report.json").exists()
        assert folder.commit() == [out / "report.json", out / "clip.mp4"]
    assert sorted(path.name for path in out.iterdir()) == ["clip.mp4", "report.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_what_was_there_before(tmp_path, error):
    (tmp_path / "clip.mp4").write_bytes(b"earlier")
    with pytest.raises(error), clip.OutputFolder(tmp_path) as folder:
        folder.path("clip.mp4").write_bytes(b"half")
        folder.path("never-written.png")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == b"earlier"


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(NotADirectoryError, match="out: expected a folder, got the file"):
        with clip.OutputFolder(tmp_path / "out"):
            raise AssertionError("never entered")
