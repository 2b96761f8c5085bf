# step
rm -f worker.pid; python3 worker.py & pid=$!; while [ ! -s worker.pid ]; do sleep 0.05; done; kill -TERM $pid; wait $pid; echo $? > status.txt
