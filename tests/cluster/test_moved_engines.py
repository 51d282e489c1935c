"""An engine that is started again at another URL: its sessions go on there, and everybody who sends turns learns it."""

import asyncio

from psrl.engine_client.client import HttpGenerator
from psrl.engines.scripted.core import ScriptedCore
from psrl.engines.scripted.script import Script, ScriptedTurn
from psrl.engines.server import build_app
from psrl.runtime.addresses import Addresses
from psrl.runtime.groups import Endpoints
from psrl.types import GenerateRequest, SamplingParams
from tests.gateway.gateway_kit import running_app

GONE = "http://127.0.0.1:9"


def core(*ids: int) -> ScriptedCore:
    return ScriptedCore(Script(turns=(ScriptedTurn(token_ids=ids),), vocab_size=64, max_model_len=1024))


def request(session: str, *, instance: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=2)
    return GenerateRequest(request_id=f"{session}-0", token_ids=[1], sampling=sampling, session=session, instance=instance)


def test_sessions_of_an_engine_go_on_at_its_new_url():
    async def go():
        async with running_app(build_app(core(5, 6))) as first, running_app(build_app(core(7, 8))) as moved:
            generator = HttpGenerator([first, GONE], retry_for_s=5)
            generator.place("s", 1)
            await generator.readdress(GONE, moved)
            answers = [await generator.generate(request("s")), await generator.generate(request("t", instance=1))]
            await generator.readdress("http://127.0.0.1:10", moved)  # of nobody's
            await generator.close()
            return [answer.token_ids for answer in answers], [replica.flow.num_bytes for replica in generator.replicas]

    answers, flows = asyncio.run(asyncio.wait_for(go(), 60))
    assert answers == [[7, 8], [7, 8]]
    assert flows[0] == 0 and flows[1] > 0


def test_everybody_learns_a_new_url_once_and_who_connects_later_gets_it():
    addresses, told = Addresses(), []

    async def tell(old: str, new: str) -> None:
        told.append((old, new, list(addresses.get().generate_urls)))

    async def go():
        addresses.set(Endpoints(generate_urls=["http://a", "http://b"], validation_urls=["http://c"]))
        addresses.on_move.append(tell)
        await addresses.move("http://b", "http://d")
        await addresses.move("http://c", "http://e")

    asyncio.run(go())
    assert told == [("http://b", "http://d", ["http://a", "http://d"]), ("http://c", "http://e", ["http://a", "http://d"])]
    assert addresses.get().validation_urls == ["http://e"]
