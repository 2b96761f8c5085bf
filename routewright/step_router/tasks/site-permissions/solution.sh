# step
find site -type d -exec chmod 755 {} + && find site -type f -exec chmod 644 {} + && find site -name '*.sh' -type f -exec chmod 755 {} +
# step
find site/private -type d -exec chmod 700 {} + && find site/private -type f -exec chmod 600 {} +
