# step
(cat logs/*.log; gzip -dc logs/*.gz) | awk '$3 == "ERROR" {count[$4]++} END {for (name in count) print count[name], name}' > counts.tmp
# step
sort -k1,1nr -k2,2 counts.tmp > errors.txt; rm counts.tmp
