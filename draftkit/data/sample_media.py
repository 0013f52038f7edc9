"""What a target reads of prepared samples besides their tokens: their images, opened again where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from draftkit.data.sample_files import media_folder, open_images
from draftkit.data.samples import Sample
from draftkit.errors import TargetError, UnsupportedTarget
from draftkit.loading import OpenedTarget
from draftkit.media import ImageFile
from draftkit.targets.media import Media
from draftkit.targets.vision import Placeholders

PREPARED_FOR = "take the target that the samples were prepared for"
MediaOfSamples = Callable[[Sequence[Sample]], Mapping[int, Media]]


def no_media(samples: Sequence[Sample]) -> Mapping[int, Media]:
    """Of samples of text alone."""
    return {}


class SampleMedia:
    """The images of the samples in the file `data`, and what the processor of `target` makes of them; `media_root` as
    of `media_folder`."""

    def __init__(self, data: Path, target: OpenedTarget, media_root: str | Path | None = None):
        self._folder = media_folder(data, Path(media_root) if media_root else None)
        self._target = target

    def __call__(self, samples: Sequence[Sample]) -> dict[int, Media]:
        """What the target is given of each sample with images, by its place among these.

        Raises `DraftkitError` for an image that is not there any more or another one, and where the target's processor
        makes other tokens of it than those of the sample.
        """
        return {place: self._inputs(sample) for place, sample in enumerate(samples) if sample.images}

    def images(self, sample: Sample) -> list[ImageFile]:
        """The images of a sample. Raises `DraftkitError` for one that is not there any more or another one."""
        return open_images(sample, self._folder)

    def _inputs(self, sample: Sample) -> Media:
        try:
            vision = self._target.vision
            found = vision.of_tokens(sample.tokens.tolist(), vision.read(self.images(sample)))
        except UnsupportedTarget as refusal:
            raise UnsupportedTarget(f"sample {sample.id} has images: {refusal.problem}", hint=PREPARED_FOR) from refusal
        except Placeholders:
            found = None
        if found is None or found.spans != sample.media:
            raise TargetError(
                f"sample {sample.id}: the target's processor makes other tokens of its images than it has",
                expected="the target and its processor as they were when the data were prepared",
                hint="prepare the data again, with this target",
            )
        return found.inputs
