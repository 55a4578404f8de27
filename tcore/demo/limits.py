"""Every limit of the page in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What visitors may use, in all and each; the defaults suit one machine and a few people."""

    upload_mb: int = 200
    """Size of an uploaded video."""
    frames: int = 240
    """Frames of a video that are used."""
    visitors: int = 8
    """Visitors at a time; a new one replaces the one who was idle longest."""
    disk_mb: float = 16_000
    """Files of all visitors: uploads, frames, features and masks."""
    visitor_mb: float = 4_000
    """Files of one visitor."""
    idle_s: float = 4 * 3600
    """A visit without any request and without a run ends after this time."""
    connections: int = 640
    """Connections at a time; requests beyond are answered with 503."""
    connection_s: int = 10
    """A connection on which no request begins is closed after this time, or up to twice as long."""
    request_s: float = 900
    """A request that takes longer, upload and download included, is given up."""
    download_mb: float = 400
    """Size of a download."""
    json_mb: float = 4
    """Size of a request that is not an upload."""
    marked: int = 100
    """Frames with labels of the visitor's own."""
    objects: int = 20
    """Objects of a mask."""
    points: int = 100
    """Points of a frame."""
