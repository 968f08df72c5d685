"""Keyframes and references from files: what the pipeline gets, and what a user is told."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest
import torch

pytest.importorskip("imageio_ffmpeg", reason="the cli extra is not installed")
pytest.importorskip("diffusers", reason="the diffusers extra is not installed")

import numpy as np
from PIL import Image

from solspark.integrations.clip import write_clip
from solspark.integrations.h3_media import open_media, workflow_of

NAMES = ("first_frame", "last_frame", "reference")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An upright and a turned picture, clips with and without sound, mono sound, and rubbish."""
    folder = tmp_path_factory.mktemp("media")
    picture = Image.new("RGB", (40, 20), (200, 0, 0))
    picture.paste((0, 0, 200), (20, 0, 40, 20))
    picture.save(folder / "picture.png")
    turn = Image.Exif()
    turn[0x0112] = 6  # the camera was held on its side
    picture.save(folder / "turned.png", exif=turn)
    frames = torch.zeros(30, 32, 64, 3, dtype=torch.uint8)
    frames += (torch.arange(30) * 8).view(30, 1, 1, 1).to(torch.uint8)
    write_clip(folder / "sound.mp4", frames, 30.0, 0.1 * torch.randn(2, 32_000), 32_000)
    write_clip(folder / "silent.mp4", frames, 24.0)
    with wave.open(str(folder / "mono.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        tone = 16_384 * np.sin(2 * np.pi * 440 / 16_000 * np.arange(16_000))
        sound.writeframes(tone.astype("<i2").tobytes())
    for name in ("bad.png", "bad.mp4", "bad.wav"):
        (folder / name).write_text("nothing that can be shown or heard")
    return folder


def test_keyframes_are_upright_pictures(folder: Path) -> None:
    media = open_media(str(folder / "picture.png"), str(folder / "turned.png"), ())
    assert sorted(media) == ["image", "last_image"]
    assert media["image"].size == (40, 20) and media["last_image"].size == (20, 40)
    assert media["image"].mode == "RGB"
    assert media["image"].getpixel((0, 0)) == (200, 0, 0)
    assert media["last_image"].getpixel((0, 0)) == (200, 0, 0)
    assert open_media(None, None, ()) == {}


def test_references_keep_their_order_and_come_at_the_models_rates(folder: Path) -> None:
    names = ("mono.wav", "picture.png", "sound.mp4", "silent.mp4")
    media = open_media(None, None, [str(folder / name) for name in names])
    sound, picture, clip, silent = media["references"]
    assert [item.kind for item in media["references"]] == ["audio", "image", "video", "video"]
    assert picture.image.size == (40, 20)
    # One second of a tone at half of full scale: as loud, and as long, at twice the rate.
    assert sound.sample_rate == 32_000 and tuple(sound.audio.shape) == (1, 32_000)
    assert sound.audio.dtype == torch.float32
    assert sound.audio.square().mean().sqrt().item() == pytest.approx(0.5 / 2**0.5, rel=0.01)
    # A second of video at 30 frames a second is 24 frames; H.264 keeps greys to a few units.
    assert clip.frames.shape == (24, 32, 64, 3) and clip.frames.dtype == np.uint8
    assert clip.fps == 24.0 and clip.has_audio and clip.audio.shape[0] == 2
    assert not silent.has_audio and silent.frames.shape == (30, 32, 64, 3)
    middle = silent.frames[:, 16, 32].astype(int)
    assert abs(middle - np.arange(30)[:, None] * 8).max() < 12


def test_the_workflow_follows_from_the_media() -> None:
    assert workflow_of(None, None, ()) == "t2va"
    assert workflow_of("a.png", None, ()) == workflow_of(None, "b.jpg", ()) == "fl2va"
    assert workflow_of(None, None, ("a.png", "b.wav")) == "ref2va"
    assert workflow_of(None, None, ("A.JPEG", "my.clip.MKV", "b.flac")) == "ref2va"


@pytest.mark.parametrize(
    ("first", "references", "message"),
    [
        ("a.png", ("b.png",), r"first_frame: expected None together with references, got 'a.png'"),
        (None, ("a.wav",), r"reference: expected an image or a video beside audio, got audio"),
        (None, ("a.txt",), r"reference: expected an image, a video or audio.* got 'a.txt'"),
        (None, ("a.png",) * 10, r"reference: expected at most 9 of kind image, got 10"),
        (None, ("a.mp4",) * 4, r"reference: expected at most 3 of kind video, got 4"),
        (
            None,
            ("a.png",) * 7 + ("b.mp4",) * 3 + ("c.mp3",) * 3,
            r"reference: expected at most 12, got 13",
        ),
    ],
)
def test_requests_that_cannot_be(first: str | None, references: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workflow_of(first, None, references)


@pytest.mark.parametrize("argument", NAMES)
def test_files_that_cannot_be_read_name_their_argument(folder: Path, argument: str) -> None:
    def read(name: str) -> None:
        given = [str(folder / name) if argument == each else None for each in NAMES]
        open_media(given[0], given[1], () if given[2] is None else (given[2],))

    with pytest.raises(FileNotFoundError, match=rf"{argument}: expected a file, got .*none\.png"):
        read("none.png")
    with pytest.raises(ValueError, match=rf"{argument}: expected an image, got .*bad\.png"):
        read("bad.png")
    if argument == "reference":
        for name in ("bad.mp4", "bad.wav"):
            with pytest.raises(
                ValueError, match=rf"reference: expected a video or audio, .*{name}"
            ):
                read(name)
