# step
tar --exclude='*.log' --exclude='build' -czf release.tar.gz project
