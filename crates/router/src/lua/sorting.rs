//! `SORT` by a pattern whose keys may be in any slot, as a script of the router.
//!
//! The names of the keys depend on the elements of the sorted key, so the node computes them. If some of them are not
//! declared, the script returns their names in the error of a rehearsal, and otherwise the result of `SORT`. So nothing can
//! change between the computation and the sorting.
//!
//! Patterns: <https://redis.io/docs/latest/commands/sort/>. `#` is the element, `*->field` a field of a hash.

use super::rehearsal::FOREIGN;

/// Returns the script. Its arguments are the name of the command, and its arguments from the second on.
pub(crate) fn sort_script() -> String {
    format!(
        "local r=string.match(ARGV[#ARGV],'^[^:]*') ARGV[#ARGV]=nil local own,seen,y,z={{}},{{}},{{}},0 for i=1,#KEYS do own[KEYS[i]]=true end \
         local k=KEYS[1] local t=redis.call('TYPE',k).ok local e={{}} \
         if t=='list' then e=redis.call('LRANGE',k,0,-1) elseif t=='set' then e=redis.call('SMEMBERS',k) \
         elseif t=='zset' then e=redis.call('ZRANGE',k,0,-1) end \
         for i=2,#ARGV-1 do local o=string.lower(ARGV[i]) if o=='by' or o=='get' then local p=ARGV[i+1] local s=string.find(p,'*',1,true) if s then \
         local f=string.find(p,'->',s+1,true) local a,b=string.sub(p,1,s-1),string.sub(p,s+1,f and f+2<=#p and f-1 or -1) \
         for j=1,#e do local n=a..e[j]..b if not own[n] and not seen[n] and #y<=1024 and z<=1000000 then seen[n]=true z=z+#n \
         y[#y+1]=','..string.gsub(string.sub(n,1,1000000),'.',function(c) return string.format('%02x',string.byte(c)) end) end end end end end \
         if y[1] then return {{err='ERR {FOREIGN}'..r..':'..table.concat(y)}} end return redis.pcall(ARGV[1],k,unpack(ARGV,2))"
    )
}
