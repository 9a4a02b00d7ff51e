// A radix tree over chains of block keys: router/locality/promises.py has its twin, and says what it means.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

struct Key {
    uint64_t low, high;
    bool operator==(const Key &) const = default;
};

// Keys are hashes already.
struct KeyHash {
    size_t operator()(const Key &key) const { return key.low; }
};

// A run of blocks, from the `start`-th of every chain through it. `held`: how many promises of each slot
// go through it, by slot; `ends`: how many end here.
struct Node {
    Node *parent;
    long start;
    std::vector<Key> keys;
    std::vector<std::pair<int32_t, int32_t>> held;
    std::unordered_map<Key, Node *, KeyHash> children;
    long ends = 0;

    long end() const { return start + long(keys.size()); }

    // The depth up to which a chain with the same head agrees: where two chains have an equal key, all
    // before it is equal too.
    long agrees_to(const Key *chain, long blocks) const {
        long low = 1, high = std::min(long(keys.size()), blocks - start), probe = high;
        while (low < high) {
            if (keys[probe - 1] == chain[start + probe - 1]) low = probe;
            else high = probe - 1;
            probe = low + (high - low + 1) / 2;
        }
        return start + low;
    }

    auto of(int32_t slot) {
        return std::lower_bound(held.begin(), held.end(), std::pair{slot, INT32_MIN});
    }
};

struct Reached {
    Node *node;
    long depth;
};

struct Tree {
    Node root{nullptr, 0, {}, {}, {}};
    int64_t *keys;

    Reached search(const Key *chain, long blocks) {
        Reached at{&root, 0};
        while (at.depth < blocks) {
            const auto child = at.node->children.find(chain[at.depth]);
            if (child == at.node->children.end()) break;
            at = {child->second, child->second->agrees_to(chain, blocks)};
            if (at.depth < at.node->end()) break;
        }
        return at;
    }

    // Cut a node in two; the new one is the upper part, so that promises keep their ends.
    Node *split(Node *node, long depth) {
        const long count = depth - node->start;
        Node *upper = new Node{node->parent, node->start, {node->keys.begin(), node->keys.begin() + count},
                               node->held, {}};
        node->parent->children[upper->keys[0]] = upper;
        node->keys.erase(node->keys.begin(), node->keys.begin() + count);
        node->start = depth;
        node->parent = upper;
        upper->children[node->keys[0]] = node;
        return upper;
    }

    // Put a node in front of its only child, where all its promises go on.
    void merge(Node *node) {
        Node *child = node->children.begin()->second;
        child->keys.insert(child->keys.begin(), node->keys.begin(), node->keys.end());
        child->start = node->start;
        child->parent = node->parent;
        node->parent->children[child->keys[0]] = child;
        delete node;
    }

    Node *leaf(const Key *chain, long blocks) {
        auto [node, depth] = search(chain, blocks);
        if (depth < node->end()) node = split(node, depth);
        if (depth == blocks) return node;
        Node *made = new Node{node, depth, {chain + depth, chain + blocks}, {}, {}};
        node->children[chain[depth]] = made;
        *keys += blocks - depth;
        return made;
    }

    void clear(Node *node) {
        std::vector<Node *> left;
        for (auto &[head, child] : node->children) left.push_back(child);
        while (!left.empty()) {
            Node *next = left.back();
            left.pop_back();
            for (auto &[head, child] : next->children) left.push_back(child);
            delete next;
        }
    }
};

}  // namespace

extern "C" {

void *wr_tree(int64_t *keys) { return new Tree{.keys = keys}; }

void wr_free(Tree *tree) {
    tree->clear(&tree->root);
    delete tree;
}

void *wr_promise(Tree *tree, const Key *chain, long blocks, int32_t slot) {
    Node *leaf = tree->leaf(chain, blocks);
    leaf->ends++;
    for (Node *node = leaf; node->parent; node = node->parent) {
        auto at = node->of(slot);
        if (at == node->held.end() || at->first != slot) at = node->held.insert(at, {slot, 0});
        at->second++;
    }
    return leaf;
}

// Take a promise off its whole way, and off the tree what nobody else goes through.
void wr_take_back(Tree *tree, Node *leaf, int32_t slot) {
    leaf->ends--;
    for (Node *node = leaf, *parent; node->parent; node = parent) {
        parent = node->parent;
        auto at = node->of(slot);
        if (!--at->second) node->held.erase(at);
        if (node->held.empty()) {
            parent->children.erase(node->keys[0]);
            *tree->keys -= long(node->keys.size());
            delete node;
        } else if (!node->ends && node->children.size() == 1) {
            tree->merge(node);
        }
    }
}

// How much of the chain each is promised: `depths` become no less, of the row of each slot, -1 for none.
void wr_promised(Tree *tree, const Key *chain, long blocks, const int32_t *rows, int32_t *depths) {
    auto [node, depth] = tree->search(chain, blocks);
    for (; node->parent; depth = node->start, node = node->parent)
        for (auto [slot, count] : node->held)
            if (rows[slot] >= 0) depths[rows[slot]] = std::max(depths[rows[slot]], int32_t(depth));
}

}  // extern "C"
