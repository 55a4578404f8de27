"""Copy the recorded clips that an open license allows, for the search of the default encoder.

    python experiments/open_clips.py DATA OUT

DATA holds `clips192/train/<source>/<clip>` and `clips192_more/<source>/<clip>` with its SOURCES.csv, frames
of 192 pixels along the short side. Taken are clips under CC0, CC BY 4.0, MIT, Apache-2.0 or BSD, except those
known to show somebody else's material: sequences of DAVIS and Kinetics, films, music videos. At most 12
frames of a clip are copied.
"""

import csv
import re
import shutil
import sys
from pathlib import Path

SOURCES = ("intel_samples", "sam2", "track_anything")  # CC BY 4.0, Apache-2.0, MIT
LICENSES = ("MIT", "CC0", "CC0 1.0", "Apache-2.0", "BSD", "Apache-2.0 / BSD (Debian package)")
# Others' material in repositories of an open license, enlarged thumbnails of 60 pixels, dots in the sky.
LEFT_OUT = re.compile(
    "test-sample13|car_turn|flamingo|mallard|motorcycle|extreme_shape|static_videos_dataset_source|stork|moonwalk|"
    "gangnam|rickroll|jesse|chaplin|mmskeleton|video_features|ask_anything|"
    "zamba/(?!.*densepose)|drone_air/(?!.*bird)"
)
MOST_FRAMES = 12
MOST_ALIKE = 12  # clips of a source whose names differ in their number alone


def find_clips(data: Path) -> list[Path]:
    """Folders of the clips."""
    clips = [path for source in SOURCES for path in sorted((data / "clips192/train" / source).iterdir())]
    with (data / "clips192_more/SOURCES.csv").open(newline="") as table:
        more = [row["clip"] for row in csv.DictReader(table) if row["licence"] in LICENSES]
    clips += [data / "clips192_more" / clip for clip in more]
    alike: dict[str, list[Path]] = {}
    for path in clips:
        name = f"{path.parent.name}/{path.name}"
        if not LEFT_OUT.search(name):
            alike.setdefault(re.sub("[0-9_]+$", "", name), []).append(path)
    return [path for group in alike.values() for path in group[:: -(-len(group) // MOST_ALIKE)]]


def main(data: Path, out: Path) -> None:
    """Copy, and say how much."""
    clips, size = find_clips(data), 0
    for clip in clips:
        frames = sorted(clip.glob("*.jpg"))
        step = max(1, -(-len(frames) // MOST_FRAMES))
        folder = out / clip.parent.name / clip.name
        folder.mkdir(parents=True, exist_ok=True)
        for frame in frames[::step]:
            shutil.copyfile(frame, folder / frame.name)
            size += frame.stat().st_size
    print(f"{len(clips)} clips, {size / 2**20:.1f} MiB in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
