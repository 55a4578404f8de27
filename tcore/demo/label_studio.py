"""A machine-learning backend for Label Studio: images or image sequences in, brush masks out.

Label Studio asks with the tasks and the XML of its labeling interface. Regions that a person marked on some
images of a sequence (brush, rectangle, key points) come back as brush masks on the other ones; on a single
image, a rectangle or key points come back as the mask of their object.
"""

import asyncio
import base64
import binascii
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tcore.data.images import Frame, decode_image
from tcore.demo.engine import Engine
from tcore.demo.http import Server, equal, explain, finish, json_of, refuse
from tcore.demo.limits import Limits
from tcore.errors import InputError
from tcore.evaluation.masks import Ids
from tcore.evaluation.resize import Size
from tcore.video.brush import pack_mask, unpack_mask
from tcore.video.mark import Marker
from tcore.video.propagate import propagate

TOKEN = "LABEL_STUDIO_API_KEY"  # environment variable: the access token of a person
KINDS = ("brushlabels", "rectanglelabels", "keypointlabels")
FETCH_S = 30


class Interface(NamedTuple):
    """What of a labeling interface matters: the brush, the image that it paints, where a task holds that."""

    brush: str
    image: str
    value: str


@dataclass
class Said:
    """What a person said about an object on one image."""

    mask: np.ndarray | None = None
    box: tuple[float, float, float, float] | None = None
    clicks: list[tuple[float, float]] | None = None
    clicks_not: list[tuple[float, float]] | None = None


class LabelStudio(Server):
    """The backend; images are fetched from one Label Studio alone."""

    def __init__(
        self, engine: Engine, limits: Limits, studio: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        check_address(studio)
        super().__init__(engine, limits, host, port)
        self.studio = studio.rstrip("/") + "/"
        self._key = os.environ.get(TOKEN, "")
        self._application = Starlette(
            routes=[
                Route("/", self._health),
                Route("/health", self._health),
                Route("/setup", self._setup, methods=["POST"]),
                Route("/predict", self._predict, methods=["POST"]),
                Route("/webhook", self._webhook, methods=["POST"]),
                Route("/versions", self._versions),
            ],
            exception_handlers=dict.fromkeys((InputError, HTTPException, OSError, Exception), explain),
        )

    @property
    def url(self) -> str:
        """The address for the settings of Label Studio, with the token as a password where one is needed."""
        return self.address.replace("://", f"://tcore:{self.token}@") if self.token else self.address

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, where other machines can ask only with the token as a password."""
        request = Request(scope)
        answer: ASGIApp = self._application
        if request.headers.get("Origin") is not None:
            answer = refuse(403, "requests of web pages are refused: Label Studio asks from its server.")
        elif self.token and not equal(_password(request), self.token):
            answer = refuse(
                401, "give the token that tcore serve printed as the password (basic authentication)."
            )
        await answer(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "UP", "model_class": "tcore"})

    async def _setup(self, request: Request) -> Response:
        data = await json_of(request, self.limits.upload_mb)
        read_interface(str(data.get("schema") or ""))
        return JSONResponse({"model_version": self.version})

    async def _versions(self, request: Request) -> Response:
        return JSONResponse({"versions": [self.version]})

    async def _webhook(self, request: Request) -> Response:
        await json_of(request, self.limits.upload_mb)
        return JSONResponse({"result": "ok"}, 201)  # nothing is trained here

    async def _predict(self, request: Request) -> Response:
        data = await json_of(request, self.limits.upload_mb)
        waiting = asyncio.wrap_future(self.engine.submit(self._answer_tasks, data))
        results = await finish(request, waiting, waiting.cancel)
        return JSONResponse({"results": results, "model_version": self.version})

    @property
    def version(self) -> str:
        """What predictions are filed under."""
        return f"tcore {self.engine.encoder.name}"

    def _answer_tasks(self, data: Mapping[str, Any]) -> list[dict[str, Any]]:
        interface = read_interface(str(data.get("label_config") or ""))
        params = data.get("params")
        context = params.get("context") if isinstance(params, dict) else None
        tasks = data.get("tasks")
        if not isinstance(tasks, list) or not all(isinstance(task, dict) for task in tasks):
            raise InputError("the request has no list of tasks.")
        return [self._answer_task(task, context, interface) for task in tasks]

    def _answer_task(self, task: dict[str, Any], context: Any, interface: Interface) -> dict[str, Any]:
        """A prediction: brush masks on every image but those that a person painted."""
        places = task.get("data", {}).get(interface.value)
        addresses = [places] if isinstance(places, str) else places
        if not isinstance(addresses, list) or not all(isinstance(one, str) for one in addresses):
            raise InputError(f"a task has no image and no list of images as data.{interface.value}.")
        if len(addresses) > self.limits.frames:
            raise InputError(
                f"a task of {len(addresses)} images: at most {self.limits.frames} may be propagated."
            )
        found = regions(task, context)
        prediction = {"model_version": self.version, "score": 0.0, "result": list[Any]()}
        if not found:
            return prediction
        frames = [self.fetch(address) for address in addresses]
        sizes = {frame.shape for frame in frames}
        if len(sizes) > 1:
            raise InputError("the images of a task have several sizes: all must have the same.")
        size = (frames[0].shape[0], frames[0].shape[1])
        labels, given, painted = self._labels(found, frames, size)
        masks = self._masks(frames, given)
        prediction["result"] = [
            write_region(interface, index if isinstance(places, list) else None, label, ids == number)
            for index, ids in masks
            for number, label in enumerate(labels, 1)
            if (index, label) not in painted and (ids == number).any()
        ]
        prediction["score"] = 1.0 if prediction["result"] else 0.0
        return prediction

    def _labels(
        self, found: list[dict[str, Any]], frames: list[Frame], size: Size
    ) -> tuple[list[str], dict[int, Ids], set[tuple[int, str]]]:
        """Names of the objects, ids by image, and what was painted by hand: image and object."""
        said: dict[tuple[int, str], Said] = {}
        for region in found:
            index = int(region.get("item_index") or 0)
            if not 0 <= index < len(frames):
                raise InputError(f"a region is on image {index}, but the task has {len(frames)}.")
            read_region(region, size, said.setdefault((index, label_of(region)), Said()))
        labels = list(dict.fromkeys(label for _, label in said))
        given: dict[int, Ids] = {}
        for (index, label), one in said.items():
            ids = given.setdefault(index, np.zeros(size, np.uint8))
            mask = one.mask
            if mask is None:
                nearby = [*frames[max(0, index - 1) : index], *frames[index + 1 : index + 2]]
                marker = Marker(frames[index], self.engine.encoder, nearby)
                mask = marker.mark(box=one.box, clicks=one.clicks or (), clicks_not=one.clicks_not or ())
            ids[mask] = 1 + labels.index(label)
        return labels, given, {key for key, one in said.items() if one.mask is not None}

    def _masks(self, frames: list[Frame], given: dict[int, Ids]) -> Iterator[tuple[int, Ids]]:
        if len(frames) == 1:
            yield from given.items()
            return
        engine = self.engine
        options: dict[str, Any] = {"detail": engine.detail, "edges": engine.edges == "guided"}
        for index, ids in enumerate(propagate(engine.encoder, np.stack(frames), given, **options)):
            yield index, np.asarray(ids)

    def fetch(self, address: str) -> Frame:
        """An image of a task: in the address itself, or from our Label Studio, and from nowhere else."""
        if address.startswith("data:"):
            try:
                return decode_image(base64.b64decode(address.partition(",")[2], validate=True), "data:")
            except binascii.Error as error:
                raise InputError("an image in a data: address is damaged.") from error
        url = urllib.parse.urljoin(self.studio, address)
        ours, theirs = urllib.parse.urlsplit(self.studio), urllib.parse.urlsplit(url)
        if (ours.scheme, ours.netloc) != (theirs.scheme, theirs.netloc):
            raise InputError(f"image {address[:200]} is not on {self.studio}, the only place that is asked.")
        headers = {"Authorization": f"Token {self._key}"} if self._key else {}
        most = self.limits.upload_mb * 10**6
        try:
            with OPENER.open(urllib.request.Request(url, headers=headers), timeout=FETCH_S) as answer:
                content = answer.read(most + 1)
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it holds the connection
            raise InputError(f"cannot get image {address[:200]}: {reason}; is {TOKEN} set?") from None
        if len(content) > most:
            raise InputError(f"image {address[:200]} has more than {self.limits.upload_mb} MB.")
        return decode_image(content, address[:200])


def check_address(studio: str) -> None:
    """Refuse what is no address of a server."""
    parts = urllib.parse.urlsplit(studio)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--label-studio {studio}: give its address, as in http://localhost:8080.")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An answer that points elsewhere is not followed: our token would go along."""

    def redirect_request(self, *values: Any) -> None:
        """No request."""


OPENER = urllib.request.build_opener(_NoRedirects())


def _password(request: Request) -> str:
    """The password of basic authentication, or nothing."""
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    try:
        return base64.b64decode(secret).decode().partition(":")[2] if kind.lower() == "basic" else ""
    except (binascii.Error, UnicodeDecodeError):
        return ""


def read_interface(xml: str) -> Interface:
    """The brush of a labeling interface, and its image.

    >>> read_interface('<View><Image name="i" valueList="$frames"/><BrushLabels name="b" toName="i"/></View>')
    Interface(brush='b', image='i', value='frames')
    """
    wanted = 'need <Image name="i" valueList="$frames"/> and <BrushLabels name="b" toName="i">'
    if "<!" in xml:
        raise InputError("a labeling interface with declarations of its own is refused.")
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise InputError(f"the labeling interface is no XML ({error}): {wanted}.") from error
    images = {tag.get("name"): tag for tag in root.iter("Image")}
    for tag in (*root.iter("BrushLabels"), *root.iter("Brush")):
        image = images.get(tag.get("toName"))
        if image is not None:
            value = (image.get("valueList") or image.get("value") or "").removeprefix("$")
            return Interface(str(tag.get("name")), str(image.get("name")), value)
    raise InputError(f"the labeling interface has no brush for an image: {wanted}.")


def regions(task: dict[str, Any], context: Any) -> list[dict[str, Any]]:
    """What a person marked: in the annotation being made, or else in the last one that was saved."""
    result = context.get("result") if isinstance(context, dict) else None
    if not result:
        saved = task.get("annotations")
        usable = [one for one in saved if isinstance(one, dict)] if isinstance(saved, list) else []
        result = next((one["result"] for one in reversed(usable) if one.get("result")), [])
    if not isinstance(result, list) or not all(isinstance(one, dict) for one in result):
        raise InputError("the regions of a task cannot be read.")
    return [one for one in result if one.get("type") in KINDS]


def label_of(region: dict[str, Any]) -> str:
    """The first label of a region; regions with the same one are the same object."""
    names = region.get("value", {}).get(region["type"])
    return str(names[0]) if isinstance(names, list) and names else "object"


def read_region(region: dict[str, Any], size: Size, said: Said) -> None:
    """Add a brush mask, a rectangle or a key point (in percent of the image) to what was said."""
    value, (height, width) = region.get("value", {}), size
    try:
        if region["type"] == "brushlabels":
            own = (int(region["original_height"]), int(region["original_width"]))
            if own != size:
                raise InputError(f"a mask is {own[1]}x{own[0]}, its image {width}x{height}.")
            mask = unpack_mask(value["rle"], size)
            said.mask = mask if said.mask is None else said.mask | mask
            return
        x, y = float(value["x"]) * width / 100, float(value["y"]) * height / 100
        if region["type"] == "rectanglelabels":
            said.box = (x, y, float(value["width"]) * width / 100, float(value["height"]) * height / 100)
            return
        place = (min(max(x - 0.5, 0), width - 1), min(max(y - 0.5, 0), height - 1))
        if region.get("is_positive", True) in (True, 1, "1"):
            said.clicks = [*(said.clicks or ()), place]
        else:
            said.clicks_not = [*(said.clicks_not or ()), place]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"a region of type {region['type']} cannot be read.") from error


def write_region(interface: Interface, index: int | None, label: str, mask: np.ndarray) -> dict[str, Any]:
    """A brush mask as Label Studio takes it; `index` is that of its image in a sequence."""
    place = {} if index is None else {"item_index": index}
    return place | {
        "type": "brushlabels",
        "from_name": interface.brush,
        "to_name": interface.image,
        "original_width": mask.shape[1],
        "original_height": mask.shape[0],
        "image_rotation": 0,
        "value": {"format": "rle", "rle": pack_mask(mask), "brushlabels": [label]},
    }
