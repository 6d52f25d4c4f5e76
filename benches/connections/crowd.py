"""10,000 idle keep-alive connections and 1,000 slow streams. crowd.py PORT PID IDLE STREAMS EVENTS"""
import asyncio, json, os, sys, time
from collections import Counter

port, pid, idle, streams, events = map(int, sys.argv[1:6])
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


def rss():
    f = {l.split(":")[0]: l.split()[1] for l in open(f"/proc/{pid}/status") if l.startswith("Vm")}
    return int(f["VmRSS"]), int(f["VmHWM"])


def say(what, *more):
    print(f"{time.time() - t0:6.1f}s {what}: RSS %d KiB, peak %d KiB, fds {len(os.listdir(f'/proc/{pid}/fd'))}" % rss(), *more, flush=True)


async def get(r, w):
    w.write(GET)
    head = await r.readuntil(b"\r\n\r\n")
    low = head.lower()
    if b"content-length:" in low:
        await r.readexactly(int(low.split(b"content-length:")[1].split(b"\r\n")[0]))
    else:
        await r.readuntil(b"0\r\n\r\n")
    return head.split()[1].decode()


async def opened(gate, ask):
    async with gate:
        try:
            r, w = await asyncio.open_connection("127.0.0.1", port)
            return ("200" if not ask else await get(r, w)), r, w
        except Exception as e:
            return repr(e)[:80], None, None


async def stream(i, gate):
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": f"{i % 20} " * 2000 + str(i)}]}).encode()
    try:
        async with gate:
            r, w = await asyncio.open_connection("127.0.0.1", port)
            w.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await r.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            return head[:40].decode()
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            d = await r.read(65536)
            if not d:
                return "cut"
            data += d
        w.close()
        return "ok" if data.count(b" word") == events and b"[DONE]" in data else f"{data.count(b' word')} events"
    except Exception as e:
        return repr(e)[:80]


async def main():
    gate = asyncio.Semaphore(200)
    say("before")
    got = await asyncio.gather(*(opened(gate, True) for _ in range(idle)))
    say("idle opened", Counter(g[0] for g in got))
    await asyncio.sleep(3)
    say("idle settled")
    tasks = [asyncio.create_task(stream(i, gate)) for i in range(streams)]
    for _ in range(3):
        await asyncio.sleep(4)
        say("streaming", "ended", sum(t.done() for t in tasks))
    say("streams ended", Counter(await asyncio.gather(*tasks)))

    async def again(g):
        async with gate:
            try:
                return await get(g[1], g[2])
            except Exception as e:
                return repr(e)[:80]

    say("idle asked again", Counter(await asyncio.gather(*(again(g) for g in got if g[1]))))
    for g in got:
        if g[2]:
            g[2].close()
    await asyncio.sleep(6)
    say("all closed")

t0 = time.time()
asyncio.run(main())
