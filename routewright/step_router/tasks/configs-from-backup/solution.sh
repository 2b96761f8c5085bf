# step
mkdir -p conf unpacked && tar -xzf backup.tar.gz -C unpacked
# step
cd unpacked && find . -type f -name '*.conf' | sed 's|^\./||' | while read -r path; do cp "$path" "../conf/$(echo "$path" | tr / -)"; done
# step
rm -r unpacked
