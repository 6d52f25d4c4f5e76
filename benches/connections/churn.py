"""Rounds of N connections opened, one request on each, all closed; RSS after each. churn.py PORT PID N ROUNDS"""
import asyncio, sys, time
port, pid, n, rounds = map(int, sys.argv[1:5])
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
def rss():
    return [int(l.split()[1]) for l in open(f"/proc/{pid}/status") if l.startswith("VmRSS")][0]
async def main():
    gate = asyncio.Semaphore(200)
    async def one():
        async with gate:
            r, w = await asyncio.open_connection("127.0.0.1", port)
            w.write(GET)
            h = await r.readuntil(b"\r\n\r\n")
            await r.readexactly(int(h.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
            return w, b" 200 " in h[:16]
    print("before", rss(), flush=True)
    for i in range(rounds):
        t = time.time()
        g = await asyncio.gather(*(one() for _ in range(n)), return_exceptions=True)
        top = rss()
        bad = [x for x in g if isinstance(x, Exception) or not x[1]]
        for x in g:
            if not isinstance(x, Exception): x[0].close()
        await asyncio.sleep(1.5)
        print(i, "open", top, "closed", rss(), "bad", len(bad), bad[:1], f"{time.time()-t:.1f}s", flush=True)
asyncio.run(main())
