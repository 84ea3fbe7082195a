# Shows what the embeddings of run-batch are good for: each sentence's nearest neighbours among the
# others, by cosine similarity. POSIX awk.
#
#   awk -f nearest.awk sentences.txt embeddings.jsonl
#
# sentences.txt: one sentence a line, under headings that begin with `#`. embeddings.jsonl: output of
# `sconce run-batch`, whose first lines belong to the sentences, in their order.

function cosine(a, b,    i, dot, aa, bb) {
    for (i = 1; i <= size; i++) {
        dot += vector[a, i] * vector[b, i]
        aa += vector[a, i] ^ 2
        bb += vector[b, i] ^ 2
    }
    return dot / sqrt(aa * bb)
}

# The sentence most like `a`, leaving out those in `used`.
function nearest(a, used,    b, best, likeness) {
    best = 0
    for (b = 1; b <= count; b++) {
        if (b == a || b in used) continue
        if (!((a, b) in known)) known[a, b] = known[b, a] = cosine(a, b)
        if (!best || known[a, b] > likeness) { best = b; likeness = known[a, b] }
    }
    return best
}

FNR == 1 { file++ }

file == 1 && /^#/ { topic = substr($0, 3); next }
file == 1 && NF { sentence[++count] = $0; topic_of[count] = topic }

file == 2 && FNR <= count {
    if (!match($0, /"embedding":\[[^]]*\]/)) {
        print "line " FNR " holds no embedding: " substr($0, 1, 200) > "/dev/stderr"
        failed = 1
        exit 1
    }
    size = split(substr($0, RSTART + 13, RLENGTH - 14), numbers, ",")
    for (i = 1; i <= size; i++) vector[FNR, i] = numbers[i]
    read++
}

END {
    if (failed) exit 1
    if (read < count) { print "embeddings are missing" > "/dev/stderr"; exit 1 }
    for (a = 1; a <= count; a++) {
        first = topic_of[a] != topic_of[a - 1]
        if (first) printf "\n%s\n  %s\n", topic_of[a], sentence[a]
        split("", used)
        for (rank = 1; rank <= 3; rank++) {
            b = nearest(a, used)
            used[b]
            same = topic_of[a] == topic_of[b]
            if (rank == 1) hits += same
            if (first) printf "    %.2f %s %s\n", known[a, b], same ? " " : "x", sentence[b]
        }
    }
    printf "\n%d sentences of %d numbers each. Shown: the first of each topic and the three others most like it\n" \
        "(cosine; x: of another topic). The one most like it is of its own topic for %d of %d sentences.\n", \
        count, size, hits, count
}
