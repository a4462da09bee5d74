-- Commands that a rehearsal does not execute, and reads that show their effects. A section has functions for a type of
-- values, then one function per command; `rehearsal.rs` takes what a script uses. Comments and line ends are removed, so
-- a comment has a line of its own.
--
-- `C` is the server's `call` or `pcall`; `K0` is the one for absent keys. `O` returns a text in lower case. `W` has the
-- effects of all scripts that are rehearsed in one call.

-- section keys
local function text(v) if type(v)=='number' then return string.format('%.17g',v) end return tostring(v) end
-- Parts of `W` for a key, made by `new`.
local function of(t,k,new) k=tostring(k) local p=t[k] if not p then p=new t[k]=p end return p end
-- The server's function, or the one for absent keys if the key was deleted.
local function base(C,k) if W.v[tostring(k)]==false then return K0 end return C end
local function get(C,k) local v=W.v[tostring(k)] if v==nil then v=C('get',k) end return v end
local function put(k,v) W.v[tostring(k)]=v return v end
-- Whether writes of a rehearsal have made a list, a set, a sorted set or a hash.
local function is_made(k) local l,s,z=W.l[k],W.s[k],W.z[k] if l and #l[3]+#l[4]>0 or s and s[2]>0 or z and z[3]>0 then return true end
  for _,v in pairs(W.h[k] or {}) do if v then return true end end return false end
local function exists(C,...) local a,n={...},0 for i=1,#a do local k=tostring(a[i]) local v=W.v[k]
  if v==nil then v=C('exists',k)==1 end if v or is_made(k) then n=n+1 end end return n end
local function delete(C,...) local n,a=exists(C,...),{...} for i=1,#a do local k=tostring(a[i])
  W.v[k]=false W.l[k]=nil W.s[k]=nil W.z[k]=nil W.h[k]=nil end return n end
local function number(v) v=tonumber(v or 0) if not v then error('ERR value is not an integer or out of range',0) end return v end
local function add(C,k,n) local v=number(get(C,k))+number(n) put(k,text(v)) return v end

-- section strings
h.get=get
h.mget=function(C,...) local a,r={...},{} for i=1,#a do local v=W.v[tostring(a[i])] if v==nil then v=C('mget',a[i])[1] or false end r[i]=v end return r end
h.incr=function(C,k) return add(C,k,1) end
h.decr=function(C,k) return add(C,k,-1) end
h.incrby=add
h.decrby=function(C,k,n) return add(C,k,-n) end
h.incrbyfloat=function(C,k,n) return text(add(C,k,n)) end
h.set=function(C,k,v,...) local o={} for i=1,select('#',...) do o[O((select(i,...)))]=true end local old=o.get and get(C,k)
  if (o.nx or o.xx) and (exists(C,k)==1)~=(o.xx or false) then return old or false end put(k,text(v)) if o.get then return old end return {ok='OK'} end
h.setnx=function(C,k,v) if exists(C,k)==1 then return 0 end put(k,text(v)) return 1 end
h.setex=function(C,k,_,v) put(k,text(v)) return {ok='OK'} end
h.psetex=function(C,k,_,v) put(k,text(v)) return {ok='OK'} end
h.mset=function(C,...) local a={...} for i=1,#a-1,2 do put(a[i],text(a[i+1])) end return {ok='OK'} end
h.append=function(C,k,v) return #put(k,(get(C,k) or '')..text(v)) end
h.getset=function(C,k,v) local old=get(C,k) put(k,text(v)) return old end
h.getdel=function(C,k) local old=get(C,k) put(k,false) return old end
h.getex=get
h.exists=exists
h.del=delete
h.unlink=delete
h.expire=exists
h.pexpire=exists
h.persist=exists

-- section lists
-- Elements popped from the left and from the right, and those pushed at the left and at the right.
local function list(k) return of(W.l,k,{0,0,{},{}}) end
local function llen(C,k) local p=list(k) return base(C,k)('llen',k)-p[1]-p[2]+#p[3]+#p[4] end
local function push(C,k,e,...) local a,p={...},list(k)[2+e] for i=1,#a do p[#p+1]=text(a[i]) end return llen(C,k) end
local function pop(C,k,e) local p,B=list(k),base(C,k) if #p[2+e]>0 then return table.remove(p[2+e]) end
  if p[1]+p[2]<B('llen',k) then local v=B('lindex',k,e==1 and p[1] or -1-p[2]) p[e]=p[e]+1 return v end
  if #p[5-e]>0 then return table.remove(p[5-e],1) end return false end
local function pops(C,k,e,n) if not n then return pop(C,k,e) end local r={}
  for i=1,math.min(n,1000) do local v=pop(C,k,e) if not v then break end r[i]=v end return #r>0 and r end
local function move(C,k,to,from,at) local v=pop(C,k,from) if v then push(C,to,at,v) end return v end
local function end_of(s) return O(s)=='left' and 1 or 2 end
h.llen=llen
h.lpush=function(C,k,...) return push(C,k,1,...) end
h.rpush=function(C,k,...) return push(C,k,2,...) end
h.lpushx=function(C,k,...) if llen(C,k)==0 then return 0 end return push(C,k,1,...) end
h.rpushx=function(C,k,...) if llen(C,k)==0 then return 0 end return push(C,k,2,...) end
h.lpop=function(C,k,n) return pops(C,k,1,n) end
h.rpop=function(C,k,n) return pops(C,k,2,n) end
h.rpoplpush=function(C,k,to) return move(C,k,to,2,1) end
h.lmove=function(C,k,to,from,at) return move(C,k,to,end_of(from),end_of(at)) end

-- section sets
-- Members by name: true if added, false if removed. Then the difference of their number.
local function set(k) return of(W.s,k,{{},0}) end
local function has(C,k,m) local i=set(k)[1][tostring(m)] if i==nil then i=base(C,k)('sismember',k,m)==1 end return i end
local function change(C,k,to,...) local a,s,n={...},set(k),0 for i=1,math.min(#a,1000) do
  if has(C,k,a[i])~=to then s[1][tostring(a[i])]=to n=n+1 end end s[2]=s[2]+(to and n or -n) return n end
local function members(C,k) local s,B,r=set(k)[1],base(C,k),{} local a=B('smembers',k) for i=1,#a do if s[a[i]]==nil then r[#r+1]=a[i] end end
  for m,i in pairs(s) do if i then r[#r+1]=m end end table.sort(r) return r end
h.sadd=function(C,k,...) return change(C,k,true,...) end
h.srem=function(C,k,...) return change(C,k,false,...) end
h.smove=function(C,k,to,m) local n=change(C,k,false,m) if n==1 then change(C,to,true,m) end return n end
h.scard=function(C,k) return base(C,k)('scard',k)+set(k)[2] end
h.sismember=function(C,k,m) return has(C,k,m) and 1 or 0 end
h.smembers=members
h.spop=function(C,k,n) local r={} for i=1,math.min(n or 1,1000) do local m=base(C,k)('srandmember',k) if not m or not has(C,k,m) then m=members(C,k)[1] end
  if not m then break end change(C,k,false,m) r[i]=m end if n then return r end return r[1] or false end

-- section zsets
-- Scores by member, false if removed. Then the number of these members, and the difference of the number of all.
local function zset(k) return of(W.z,k,{{},0,0}) end
local function score(C,k,m) local s=zset(k)[1][tostring(m)] if s==nil then s=base(C,k)('zscore',k,m) end return s end
local function rank(C,k,m,s) local z,old=zset(k),score(C,k,m) m=tostring(m) if z[1][m]==nil then z[2]=z[2]+1 end z[1][m]=s and text(s)
  z[3]=z[3]+(s and 1 or 0)-(old and 1 or 0) return old and 1 or 0 end
local function zpop(C,k,n,is_max) local z,c,r=zset(k),{},{} n=math.min(n or 1,1000)
  local b=base(C,k)(is_max and 'zrevrange' or 'zrange',k,0,n+z[2]-1,'withscores')
  for i=1,#b-1,2 do if z[1][b[i]]==nil then c[#c+1]={b[i],b[i+1]} end end for m,s in pairs(z[1]) do if s then c[#c+1]={m,s} end end
  table.sort(c,function(a,b) if is_max then a,b=b,a end local x,y=tonumber(a[2]),tonumber(b[2]) if x==y then return a[1]<b[1] end return x<y end)
  for i=1,math.min(n,#c) do r[2*i-1],r[2*i]=c[i][1],c[i][2] rank(C,k,c[i][1],false) end return r end
h.zadd=function(C,k,...) local a,o,i,n={...},{},1,0 while a[i] and not tonumber(a[i]) do o[O(a[i])]=true i=i+1 end
  for j=i,#a-1,2 do local old,s=score(C,k,a[j+1]),a[j] if not (o.nx and old or o.xx and not old) then
  if o.incr then s=(tonumber(old) or 0)+s n=text(s) elseif not old then n=n+1 end rank(C,k,a[j+1],s) end end return n end
h.zrem=function(C,k,...) local a,n={...},0 for i=1,#a do n=n+rank(C,k,a[i],false) end return n end
h.zincrby=function(C,k,n,m) local s=text((tonumber(score(C,k,m)) or 0)+n) rank(C,k,m,s) return s end
h.zcard=function(C,k) return base(C,k)('zcard',k)+zset(k)[3] end
h.zscore=score
h.zpopmin=function(C,k,n) return zpop(C,k,n,false) end
h.zpopmax=function(C,k,n) return zpop(C,k,n,true) end

-- section hashes
-- Values by field, false if deleted.
local function hash(k) return of(W.h,k,{}) end
local function field(C,k,f) local v=hash(k)[tostring(f)] if v==nil then v=base(C,k)('hget',k,f) end return v end
local function store(C,k,...) local a,n={...},0 for i=1,#a-1,2 do if not field(C,k,a[i]) then n=n+1 end hash(k)[tostring(a[i])]=text(a[i+1]) end return n end
local function hadd(C,k,f,n) local v=number(field(C,k,f))+number(n) hash(k)[tostring(f)]=text(v) return v end
h.hget=field
h.hmget=function(C,k,...) local a,r={...},{} for i=1,#a do r[i]=field(C,k,a[i]) end return r end
h.hset=store
h.hmset=function(C,k,...) store(C,k,...) return {ok='OK'} end
h.hsetnx=function(C,k,f,v) if field(C,k,f) then return 0 end return store(C,k,f,v) end
h.hincrby=hadd
h.hincrbyfloat=function(C,k,f,n) return text(hadd(C,k,f,n)) end
h.hdel=function(C,k,...) local a,n={...},0 for i=1,#a do if field(C,k,a[i]) then n=n+1 end hash(k)[tostring(a[i])]=false end return n end
h.hexists=function(C,k,f) return field(C,k,f) and 1 or 0 end

-- section others
h.sort=function(C,...) for i=2,select('#',...) do local o=select(i,...) if type(o)=='string' and O(o)=='store' then return 0 end end return C('sort',...) end
h.publish=function() return 0 end
h.spublish=function() return 0 end
h.xadd=function() return '0-1' end
