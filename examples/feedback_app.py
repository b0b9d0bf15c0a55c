"""A product in one file: it answers, shows two thumbs, and sends what people click.

    pip install rollwire
    rollwire up && rollwire topics apply && rollwire gateway --open     # in another shell
    uvicorn --app-dir examples feedback_app:app

The gateway is $ROLLWIRE_FEEDBACK_URL, its key $ROLLWIRE_FEEDBACK_KEY (a gateway on this machine with --open needs none).
"""

import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from rollwire.producers.feedback import AsyncFeedbackClient
from rollwire.schemas.errors import Refused
from rollwire.schemas.ids import new_group_id, rollout_id

GATEWAY = os.environ.get("ROLLWIRE_FEEDBACK_URL", "http://127.0.0.1:8300")
SPOOL = os.environ.get("FEEDBACK_SPOOL", "feedback-spool")  # what people clicked outlives this process here

PAGE = """<!doctype html><title>Ask</title>
<p>6 * 7 is 42.</p>
<button onclick="say(1)">👍</button> <button onclick="say(-1)">👎</button>
<script>
  const say = (thumb) => fetch("/thumb", {{
    method: "POST",
    body: JSON.stringify({{ rollout: "{rollout}", thumb }}),
  }});
</script>"""


async def answer(request: Request) -> Response:
    # Whoever serves the model gives this id with the answer; here nobody does.
    rollout = rollout_id(new_group_id(time.time_ns() // 1_000, secrets.randbits(74)), 0)
    page = HTMLResponse(PAGE.format(rollout=rollout))
    page.set_cookie("person", request.cookies.get("person") or secrets.token_hex(8))
    return page


async def thumb(request: Request) -> Response:
    said = await request.json()
    feedback: AsyncFeedbackClient = request.app.state.feedback
    try:
        # Does not wait for the network. Of several thumbs on one answer the last one counts: the rules say so.
        await feedback.send(said["rollout"], "thumb", said["thumb"], subject=request.cookies.get("person"))
    except Refused as refused:
        return Response(str(refused), status_code=400)
    return Response(status_code=202)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with AsyncFeedbackClient(GATEWAY, spool=SPOOL) as app.state.feedback:
        yield


app = Starlette(
    routes=[Route("/", answer), Route("/thumb", thumb, methods=["POST"])],
    lifespan=lifespan,
)
