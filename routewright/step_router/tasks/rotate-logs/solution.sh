# step
mkdir -p archive && find logs -maxdepth 1 -type f -name '*.log' -size +1000c
# step
for path in $(find logs -maxdepth 1 -type f -name '*.log' -size +1000c); do gzip -c "$path" > "archive/$(basename "$path").gz" && : > "$path"; done
