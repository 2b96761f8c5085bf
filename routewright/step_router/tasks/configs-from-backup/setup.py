import gzip
import io
import random
import sys
import tarfile

rng = random.Random(int(sys.argv[1]))
buffer = io.BytesIO()
with tarfile.open(fileobj=buffer, mode="w") as archive:
    for folder in ("etc", "etc/web", "etc/db", "home/ann", "var/log"):
        for name in rng.sample(["main", "site", "cache", "users", "notes"], 3):
            for ending in rng.sample([".conf", ".txt", ".conf.bak"], 2):
                data = f"{folder} {name} {rng.random()}\n".encode()
                member = tarfile.TarInfo(f"{folder}/{name}{ending}")
                member.size, member.mode = len(data), 0o644
                archive.addfile(member, io.BytesIO(data))
with open("backup.tar.gz", "wb") as file:
    file.write(gzip.compress(buffer.getvalue(), mtime=0))
