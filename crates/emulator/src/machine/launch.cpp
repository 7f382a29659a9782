// Launches, read from text.
#include "launch.h"

namespace host {

Launch read_launch(Reader& reader) {
    reader.expect_name("grid");
    Launch launch;
    launch.blocks.x = (u32)reader.number();
    launch.blocks.y = (u32)reader.number();
    launch.blocks.z = (u32)reader.number();
    launch.threads = (u32)reader.number();
    launch.shared = (u32)reader.number();
    launch.cluster = (u32)reader.number();
    for (std::string kind = reader.name(); kind != "end"; kind = reader.name()) {
        Word word = {};
        word.kind = kind[0];
        if (kind == "a" || kind == "m") word.position = reader.number();
        word.offset = reader.number();
        if (kind == "m") {
            word.rank = (int)reader.number();
            for (u64& size : word.sizes) size = (u64)reader.number();
            for (u64& stride : word.strides) stride = (u64)reader.number();
            for (u64& size : word.tile) size = (u64)reader.number();
        }
        launch.words.push_back(word);
    }
    return launch;
}

std::vector<u64> words_of(const Launch& launch, const Places& places) {
    std::vector<u64> words;
    for (const Word& word : launch.words) {
        const bool named = word.kind == 'a' || (word.kind == 'm' && word.position >= 0);
        if (named && (size_t)word.position >= places.arguments.size()) emulator::fail("no argument %lld", word.position);
        const char* own = word.kind == 'k' ? places.kept : word.kind == 'f' ? places.fault : places.workspace;
        const char* place = named ? places.arguments[word.position] : own;
        if (word.kind == 'n') {
            words.push_back((u64)word.offset);
        } else if (word.kind == 'm') {
            const TensorMap map = emulator::describe(place + word.offset, word.rank, word.sizes, word.strides, word.tile);
            words.insert(words.end(), map.opaque, map.opaque + 16);
        } else {
            words.push_back((u64)(place + word.offset));
        }
    }
    return words;
}

}  // namespace host
