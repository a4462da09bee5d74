"""Checks redis-py at an address: readers of a few hot keys, in both protocols, see no value older than a write acknowledged before the read."""

import sys
import threading
import time

import redis

host, port = sys.argv[1].rsplit(":", 1)
SECONDS = 3
KEYS = [f"fresh:{number}" for number in range(4)]
told = {key: 0 for key in KEYS}
wrong = []
checks = 0
over = threading.Event()


def connect(protocol):
    return redis.Redis(host=host, port=int(port), protocol=protocol, decode_responses=True)


def write(key):
    r = connect(3)
    number = 0
    script = r.register_script("return redis.call('SET', KEYS[1], ARGV[1])")
    while not over.is_set():
        number += 1
        form = number % 4
        if form == 0:
            r.set(key, number)
        elif form == 1:
            r.set(key, number, px=60_000)
        elif form == 2:
            with r.pipeline(transaction=True) as pipe:
                pipe.set(key, number).strlen(key).execute()
        else:
            script(keys=[key], args=[number])
        told[key] = number
        time.sleep(0.002)


def read(protocol, lock=threading.Lock()):
    global checks
    r = connect(protocol)
    seen = 0
    while not over.is_set():
        for key in KEYS:
            least = told[key]
            if seen % 5 == 0:
                value = r.mget([key, KEYS[0]])[0]
            else:
                value = r.get(key)
            if int(value or 0) < least:
                wrong.append(f"{key}: {value}, where {least} was answered")
                over.set()
            seen += 1
    with lock:
        checks += seen


threads = [threading.Thread(target=write, args=(key,)) for key in KEYS]
threads += [threading.Thread(target=read, args=(2 + number % 2,)) for number in range(6)]
for thread in threads:
    thread.start()
over.wait(SECONDS)
over.set()
for thread in threads:
    thread.join()
if wrong:
    raise SystemExit("\n".join(wrong))
print(f"ok: {checks} checks")
